"""The user's DataModule on a data host: runs its hooks in Lightning's order, and keeps the requested loaders."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_sm.data.host.loader import ServedLoader, describe_structure
from lightning_sm.data.host.random_state import seed_all
from lightning_sm.data.host.trainer_stand_in import TrainerStandIn
from lightning_sm.data.plan.seeds import hook_seed
from lightning_sm.data.protocol.calls import Loaders, OpenRequest, Problem, SetUp
from lightning_sm.data.protocol.plain_values import plain_json
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# A hook that takes longer gets a line in the log.
_SLOW_HOOK_S = 10.0


class ServedModule:
    """The user's DataModule, whose hooks run when trainers request it.

    Args:
        datamodule: The user's DataModule.

    Attributes:
        loaders: The opened loaders, by the name of the request that opened them.
        replies: The replies to successful requests, by their name.
    """

    def __init__(self, datamodule: Any) -> None:
        self.loaders: dict[str, list[ServedLoader]] = {}
        self.replies: dict[str, SetUp | Loaders] = {}
        self._datamodule = datamodule
        self._trainer: TrainerStandIn
        self._is_prepared = False
        self._changed: set[str] = set()
        self._trainer_run: int | None = None
        self._stage: str | None = None
        self._left_trainer_runs: set[int] = set()
        self._state = ""  # loaded by the DataModule in this run of the Trainer

    def open(self, request: OpenRequest) -> SetUp | Loaders | Problem:
        """Run ``prepare_data``, ``setup`` and a ``*_dataloader`` hook, each unless it has run already.

        Args:
            request: The request of a trainer.
        """
        opening = request.opening
        try:
            if opening not in self.replies:
                self.replies[opening] = self._run_hooks(request)
            return self.replies[opening]
        except Exception as error:  # noqa: BLE001  # the error of the user's hook is sent to the trainers
            return Problem.of(error, request.hook)

    def leave(self) -> None:
        """Run ``teardown``, if ``setup`` has run."""
        if self._trainer_run is None:
            return
        self.loaders.clear()
        self.replies.clear()
        self._left_trainer_runs.add(self._trainer_run)
        self._trainer_run = None
        self._datamodule.teardown(stage=self._stage)

    def _run_hooks(self, request: OpenRequest) -> SetUp | Loaders:
        self._enter(request)
        if not request.loaders:
            return self._set_up()
        if request.state not in ("", self._state):
            self._state = request.state
            self._datamodule.load_state_dict(json.loads(self._state))
        hook = f"{request.loaders}_dataloader"
        seed, epoch = request.seed, request.epoch
        seed_all(hook_seed(seed, hook, epoch))
        with _timed(f"{hook}()"), self._trainer.noting_reads() as reads:
            returned = getattr(self._datamodule, hook)()
            structure, loaders = describe_structure(returned, hook, request.loaders, seed=seed, epoch=epoch)
        if not all(loader.description.is_split for loader in loaders):
            reads.check()
        self._forget_older_loaders(request.opening)
        self.loaders[request.opening] = loaders
        return Loaders(structure, [loader.description for loader in loaders])

    def _forget_older_loaders(self, opening: str) -> None:
        """Forget all earlier loaders of a hook but the newest, which a slower rank may still read."""
        stage = opening.rpartition("/")[0]
        older = [name for name in self.loaders if name.rpartition("/")[0] == stage]
        for name in older[:-1]:
            del self.loaders[name], self.replies[name]

    def _enter(self, request: OpenRequest) -> None:
        """Run the hooks of a new ``fit``, ``validate``, ``test`` or ``predict``."""
        if request.trainer_run in self._left_trainer_runs:
            raise DataSettingsError(
                "Another training run has taken over this data host, which serves one run at a time. Start separate "
                "data hosts for each run."
            )
        self._trainer = self._datamodule.trainer = TrainerStandIn(request.trainer)
        if request.trainer_run == self._trainer_run:
            return
        if request.prepares and not self._is_prepared:
            seed_all(hook_seed(request.seed, "prepare_data", 0))
            with _timed("prepare_data()"), self._trainer.noting_reads() as reads:
                self._datamodule.prepare_data()
            reads.check()
            self._is_prepared = True
        self.leave()
        before = {name: (value, plain_json(value)) for name, value in vars(self._datamodule).items()}
        # Every host, even one that restarts or belongs to a resumed job, must split the data alike.
        seed_all(hook_seed(request.seed, "setup", 0))
        with _timed(f"setup({request.stage!r})"), self._trainer.noting_reads() as reads:
            self._datamodule.setup(stage=request.stage)  # by its name, as Lightning calls it
        reads.check()
        # Accumulated over all runs of the Trainer: a later setup() may set the same objects again.
        self._changed |= {
            name
            for name, value in vars(self._datamodule).items()
            if name not in before or before[name][0] is not value or before[name][1] != plain_json(value)
        }
        self._trainer_run = request.trainer_run
        self._stage = request.stage
        self._state = ""

    def _set_up(self) -> SetUp:
        """Return the plain values that ``setup`` has set or changed, and the names of all others."""
        attributes = {}
        missing = []
        for name in sorted(self._changed & vars(self._datamodule).keys()):
            text = plain_json(getattr(self._datamodule, name))
            if text is None:
                missing.append(name)
            else:
                attributes[name] = json.loads(text)
        return SetUp(attributes, missing)


@contextmanager
def _timed(hook: str) -> Iterator[None]:
    """Log the duration of a user's hook, at INFO if it is long. While it runs, trainers log what they wait for."""
    logger.debug("Running %s", hook)
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    logger.log(logging.INFO if seconds >= _SLOW_HOOK_S else logging.DEBUG, "%s took %.1f s", hook, seconds)
