"""Makes Python processes start and end sooner. Loaded through PYTHONPATH.

Start: imports create a million objects that stay, so the garbage collector takes a quarter of the time of importing
Lightning; here it runs less often, which halves that. Torchmetrics finds no torchvision, SciPy and Matplotlib, which it
imports if they are installed, for metrics of images and sound and for plots, which no test uses. Scripts and other
packages find them. ``torch._dynamo``, the compiler, which Lightning and optimizers import although no test compiles
anything, is imported only when its other parts are used. Torch imports neither Triton, whose presence it
only checks, nor the CUDA bindings, which it does not need, nor what it implements in Python for tensors without data: a
sixth of its own time.

End: the interpreter's last garbage collections find nothing to do. With all objects of torch and Lightning, they take a
second. What must happen at the end does not depend on a collection, because Python guarantees none
(``object.__del__``).

Together, this saves two thirds of the time of a small training, of which the tests start many hundreds.
Processes in containers and in virtual environments that tests create start and end without this, like those of users.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

_HIDDEN = ("torchvision", "scipy", "matplotlib")
_COMPILER = "torch._dynamo"
_COMPILER_UTILS = f"{_COMPILER}.utils"
_META_KERNELS = "torch._meta_registrations"
# They and the kernels import each other, which works only if the kernels come first.
_WITH_META_KERNELS = ("torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store")


class _UnusedCompiler(ModuleType):
    """A stand-in for ``torch._dynamo`` with the parts that programs need if they compile nothing.

    Any other part imports the real module.

    Lightning keeps the stand-in's ``OptimizedModule``, so a test that gives Lightning a compiled model must start its
    processes without this folder.
    """

    OptimizedModule = type("OptimizedModule", (), {})
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer", is_compile_supported=lambda _: False)
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
    __path__: Sequence[str] = ()

    @staticmethod
    def graph_break() -> None:
        """Do nothing."""

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function, or a decorator that does so."""
        return function or (lambda decorated: decorated)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real_compiler(), name)


def _real_compiler() -> ModuleType:
    """Import the real module in place of the stand-in, unless that has been done."""
    if isinstance(sys.modules[_COMPILER], _UnusedCompiler):
        sys.meta_path.remove(_COMPILER_FINDER)
        del sys.modules[_COMPILER], sys.modules["torch"]._dynamo  # type: ignore[attr-defined]
    return import_module(_COMPILER)


class _CompilerFinder:
    """Finds the stand-in, until something needs the real module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _COMPILER:
            return ModuleSpec(fullname, self)
        if not fullname.startswith(f"{_COMPILER}."):
            return None
        folders = _real_compiler().__path__
        return _spec_of_imported(fullname) or PathFinder.find_spec(fullname, folders)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _UnusedCompiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


_COMPILER_FINDER = _CompilerFinder()


class _Imported:
    """Loads a module that another one has imported while a finder looked for it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


def _spec_of_imported(fullname: str) -> ModuleSpec | None:
    if fullname not in sys.modules:
        return None
    spec: Any = sys.modules[fullname].__spec__
    spec.loader = _Imported()  # importlib takes this spec, and would execute the module a second time
    return spec


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _WITH_META_KERNELS:
            import_module(_META_KERNELS)
            return _spec_of_imported(fullname)  # None while the kernels import it
        if fullname not in _EXECUTE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_EXECUTE[fullname], spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute_package(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    # It asks for SciPy by name, and only here.
    asked: Any = import_module("lightning_utilities.core.imports")
    is_available = asked.package_available
    asked.package_available = lambda name: name not in _HIDDEN and is_available(name)
    try:
        execute(module)
    finally:
        asked.package_available = is_available


def _execute_flags(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    for name, flag in vars(module).items():
        if str(getattr(flag, "requirement", "")).startswith(_HIDDEN):
            setattr(module, name, False)


def _execute_without(name: str, stand_in: Any, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    # The module imports one name of the other, and uses it only on GPUs or for compiled models.
    sys.modules.setdefault(name, stand_in)
    try:
        execute(module)
    finally:
        if sys.modules[name] is stand_in:
            del sys.modules[name]


def _execute_torch(execute: Callable[[ModuleType], None], module: Any) -> None:
    _execute_without(_META_KERNELS, SimpleNamespace(), execute, module)
    if base := getattr(module, "_custom_class_base", None):  # the kernels' modules do this for all of torch
        module._C._set_generator_metaclass(base.CustomClassBaseMeta)


_WITHOUT_TRITON = partial(_execute_without, "triton.runtime.jit", SimpleNamespace(JITFunction=type(None)))
_EXECUTE = {
    "torch": _execute_torch,
    "torch.utils.flop_counter": _WITHOUT_TRITON,
    "torchmetrics": _execute_package,
    "torchmetrics.utilities.imports": _execute_flags,
    "torchvision.ops.roi_align": partial(_execute_without, _COMPILER_UTILS, _UnusedCompiler.utils),
}

# Torch uses them for a few features on GPUs, if they are installed.
sys.modules["cuda.bindings"] = None  # type: ignore[assignment]
gc.set_threshold(200_000, 20, 1000)
sys.meta_path[:0] = [_Finder(), _COMPILER_FINDER]
atexit.register(gc.freeze)  # the first one registered is the last one called
