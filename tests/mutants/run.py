"""Runs the tests of a module on its mutants, each in a process of its own, without a change on disk."""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutants.operators import Mutant

# The same examples each time, whatever failed before, and no smaller ones.
settings.register_profile(
    "mutants", deadline=None, database=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
_PYTEST = ("-q", "-x", "-n", "0", "-m", "not proof", "--assert=plain", "-p", "no:cacheprovider")
_NOT_PYTHON, _TOO_LONG = 100, 101  # no exit codes of pytest's
_POLL_S = 0.2
# A mutant may loop for ever, and fill the memory. A test may take so many times its CPU time, and so many seconds more;
# all tests together, on a busy machine, so many times the CPU time of all.
_TIMES_THE_CPU, _MORE_CPU_S = 4, 2.0
_TIMES_ALL, _MORE_S = 100, 300.0
_MAX_BYTES = 6 << 30
_CONTEXT = get_context("fork")


@dataclass(frozen=True)
class Module:
    """A module, and the tests that must notice when one of its rules is another one.

    Attributes:
        path: Its path in the repository.
        tests: The paths of their files.
    """

    path: str
    tests: Sequence[str]

    @property
    def name(self) -> str:
        """Its dotted name."""
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def source(self) -> str:
        """Its code."""
        return Path(self.path).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Found:
    """What became of the mutants of a module.

    Attributes:
        num_mutants: How many there were.
        survivors: Those with which all tests pass.
    """

    num_mutants: int
    survivors: list[Mutant]


class _Limits:
    """A plugin of pytest that measures the CPU time of each test, or ends the process in a test that takes far more.

    Args:
        cpu_s: Seconds that the tests take without mutation, by name; None measures them.
    """

    def __init__(self, cpu_s: Mapping[str, float] | None = None) -> None:
        self._cpu_s = cpu_s
        self._end_s = math.inf
        self.measured: dict[str, float] = {}
        if cpu_s is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began_s = time.process_time()
        if self._cpu_s is not None:
            self._end_s = began_s + _TIMES_THE_CPU * self._cpu_s[item.nodeid] + _MORE_CPU_S
        try:
            return (yield)
        finally:
            self.measured[item.nodeid] = time.process_time() - began_s

    def _watch(self) -> None:
        # Linux's timers of CPU time count whole ticks: on a busy machine, several times the true one.
        while time.process_time() < self._end_s:
            time.sleep(_POLL_S)
        os._exit(_TOO_LONG)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(MetaPathFinder):
    def __init__(self, module: Module, code: CodeType) -> None:
        self._module = module
        self._code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._module.name:
            return None
        file = str(Path(self._module.path).absolute())
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, file, self._code))


def run(module: Module, mutants: Sequence[Mutant], workers: int) -> Found:
    """Run the tests on mutants.

    Args:
        module: The module.
        mutants: Its mutants.
        workers: How many run at a time.

    Raises:
        SystemExit: The tests fail without any mutation.
    """
    cpu_s = _prepare(module)
    limit_s = _TIMES_ALL * sum(cpu_s.values()) + _MORE_S
    waiting = deque(mutants)
    running: dict[BaseProcess, tuple[Mutant, float]] = {}
    exits: list[tuple[Mutant, int | None]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.popleft()
            process = _CONTEXT.Process(target=_test_mutant, args=(module, mutant, cpu_s))
            process.start()
            running[process] = mutant, time.monotonic() + limit_s
        connection.wait([process.sentinel for process in running], timeout=1)
        for process, (mutant, deadline) in list(running.items()):
            if process.is_alive() and time.monotonic() < deadline:
                continue
            process.kill()
            process.join()
            exits.append((mutant, process.exitcode))
            del running[process]
    tested = [(mutant, code) for mutant, code in exits if code != _NOT_PYTHON]
    return Found(len(tested), [mutant for mutant, code in tested if code == 0])


def _prepare(module: Module) -> dict[str, float]:
    """Run the tests without a mutation, import what they import of other packages, and return their CPU times."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_test_original, args=(module, theirs))
    process.start()
    theirs.close()
    try:
        code, cpu_s, packages = ours.recv()
    except EOFError:
        code, cpu_s, packages = "no exit code", {}, []
    process.join()
    if code != 0:
        raise SystemExit(f"The tests of {module.path} fail without a mutation ({code}).")
    for package in packages:
        with suppress(ImportError):
            import_module(package)
    return dict(cpu_s)


def _test_original(module: Module, answer: Any) -> None:
    limits = _Limits()
    code = _run_tests(module, limits)
    names = {name.partition(".")[0] for name in sys.modules}
    others = sorted(names - {"lightning_sm", "tests", "app", "__mp_main__"})
    answer.send((code, limits.measured, others))
    answer.close()
    os._exit(0)


def _test_mutant(module: Module, mutant: Mutant, cpu_s: Mapping[str, float]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        code = compile(mutant.code(module.source), module.path, "exec", dont_inherit=True)
    except SyntaxError:
        os._exit(_NOT_PYTHON)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    sys.meta_path.insert(0, _Finder(module, code))
    os._exit(_run_tests(module, _Limits(cpu_s)))


def _run_tests(module: Module, limits: _Limits) -> int:
    if module.name in sys.modules:
        raise AssertionError(f"{module.name} was imported before its mutant.")
    return int(pytest.main([*_PYTEST, "--hypothesis-profile=mutants", *module.tests], plugins=[limits]))
