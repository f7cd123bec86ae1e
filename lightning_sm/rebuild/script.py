"""The process that runs the user's script up to its ``fit``, and builds recorded batches from what it hands over.

Run it as ``python -m lightning_sm.rebuild.script REQUEST SCRIPT [ARGS]``, or with ``-m MODULE`` in place of SCRIPT. The
script finds no job: what it would do on a laptop, it does here, but its Trainers neither train nor evaluate.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from lightning_sm._import_hook import after_import
from lightning_sm.errors import LightningSMError, ReplayError
from lightning_sm.rebuild.messages import RebuildRequest, Rebuilt, Refused, WantedBatch
from lightning_sm.rebuild.recorded_step import RecordedBatch
from lightning_sm.record.events import TrainingPass, from_json

_TRAINERS = ("pytorch_lightning.trainer.trainer", "lightning.pytorch.trainer.trainer")
# What a Trainer gets instead of the script's arguments: it never trains, and need not have the user's accelerator.
_ARGUMENTS = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
_NOTHING: dict[str, Any] = {"fit": None, "validate": [], "test": [], "predict": []}


class _FitWasFound(SystemExit):
    """The end of the script, after its ``fit`` has been found. Not an Exception, which scripts may catch."""


class _Fits:
    """The Trainers of the script, and the fits of each.

    Args:
        request: What to rebuild.
    """

    def __init__(self, request: RebuildRequest) -> None:
        self._request = request
        self._orders: dict[int, int] = {}
        self._trainers: list[Any] = []  # kept, so that no two have the same id
        self._fits: Counter[int] = Counter()

    def change(self, module: ModuleType) -> None:
        """Let Trainers of a distribution of Lightning hand over what they get."""
        trainer: Any = module.Trainer
        trainer.__init__ = self._init(trainer.__init__)
        for name in _NOTHING:
            setattr(trainer, name, self._method(getattr(trainer, name)))

    def _init(self, init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def call(trainer: Any, *_args: Any, **_kwargs: Any) -> None:
            self._trainers.append(trainer)
            self._orders[id(trainer)] = len(self._trainers)
            init(trainer, **_ARGUMENTS)

        return call

    def _method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)
        name = method.__name__

        @wraps(method)
        def call(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "fit":
                self._fits[id(trainer)] += 1
                if f"{self._orders[id(trainer)]}-{self._fits[id(trainer)]}" == self._request.fit:
                    given = signature.bind(trainer, *args, **kwargs).arguments
                    _rebuild(self._request, trainer, given)
                    raise _FitWasFound(0)
            return _NOTHING[name]

        return call


def _rebuild(request: RebuildRequest, trainer: Any, given: dict[str, Any]) -> None:
    """Build the batches of a request, and write them and what was found out about them."""
    # Loads the Lightning that the script has imported by now.
    from lightning_sm.data.host.world import world_of_one  # noqa: PLC0415
    from lightning_sm.rebuild.served import ServedScript, assemble, handed_over, save  # noqa: PLC0415

    wanted = [[_recorded(batch) for batch in batches] for batches in request.batches]
    with world_of_one():
        script = ServedScript(handed_over(trainer, given), wanted[0][0].begun)
        answers, contents = [], []
        for batches in wanted:
            built = [(one.begun.index, *script.build(one)) for one in batches]
            answers.append([answer for _, _, answer in built])
            contents.append(assemble(script.structure, {index: batch for index, batch, _ in built}))
        script.close()
    save(contents, answers, Path(request.output))
    Path(request.answer).write_bytes(Rebuilt(answers).encode())


def _recorded(batch: WantedBatch) -> RecordedBatch:
    begun = from_json(batch.begun)
    if not isinstance(begun, TrainingPass):
        raise ReplayError(f"This is no start of a pass: {batch.begun[:200]}.")
    return RecordedBatch(begun, batch.number, 0, batch.shard, batch.shard_pass, batch.replacements)


def main(argv: list[str]) -> int:
    """Run the script, and return the exit code.

    Args:
        argv: File with the request, and the script with its arguments.
    """
    request = msgspec.json.decode(Path(argv[0]).read_bytes(), type=RebuildRequest)
    after_import(_TRAINERS, _Fits(request).change)
    is_module = argv[1] == "-m"
    name, *args = argv[2:] if is_module else argv[1:]
    sys.argv = [name, *args]
    try:
        if is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
            runpy.run_path(name, run_name="__main__")
    except _FitWasFound:
        return 0
    except LightningSMError as error:
        Path(request.answer).write_bytes(Refused(f"{type(error).__name__}: {error}").encode())
        return 2
    Path(request.answer).write_bytes(
        Refused(
            f"The script ended before fit {request.fit} (number of the Trainer, and of its fit), in which the step was "
            "trained. Does it make its Trainers in another order here, or stop before?"
        ).encode()
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
