"""The DataModule of rank 0 on a data host: runs its hooks in Lightning's order, and keeps the requested loaders."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from lightning_sm.data.host.generators import seed_all
from lightning_sm.data.host.loader import ServedLoader, describe_structure
from lightning_sm.data.host.snapshot import load_from_trainers
from lightning_sm.data.host.trainer_stand_in import stand_in
from lightning_sm.data.plan.seeds import hook_seed
from lightning_sm.data.protocol.calls import Loaders, OpenRequest, Problem, SetUp
from lightning_sm.data.protocol.plain_values import plain_json, plain_value
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# A hook that takes longer gets a line in the log.
_SLOW_HOOK_S = 10.0


class ServedModule:
    """The DataModules that rank 0 sends, whose hooks run when trainers request it.

    Attributes:
        loaders: The opened loaders, by the name of the request that opened them.
        replies: The replies to successful requests, by their name.
    """

    def __init__(self) -> None:
        self.loaders: dict[str, list[ServedLoader]] = {}
        self.replies: dict[str, SetUp | Loaders] = {}
        self._snapshots: dict[str, int] = {}  # descriptors by digest
        self._module: _LiveModule | None = None
        self._trainer_run: int | None = None
        self._stage: str | None = None
        self._left_trainer_runs: set[int] = set()

    @property
    def snapshots(self) -> list[str]:
        """Digests of the snapshots that it has, the newest last."""
        return list(self._snapshots)

    def descriptor(self, digest: str) -> int:
        """Return the memory of a snapshot."""
        return self._snapshots[digest]

    def keep(self, digest: str, fd: int, kept: Sequence[str]) -> None:
        """Take a snapshot of rank 0.

        Args:
            digest: Its digest.
            fd: Its memory.
            kept: Digests of the snapshots that may still be requested.
        """
        for old in [digest, *(self._snapshots.keys() - set(kept))]:
            if old in self._snapshots:
                os.close(self._snapshots.pop(old))
        self._snapshots[digest] = fd

    def open(self, request: OpenRequest) -> SetUp | Loaders | Problem:
        """Run ``prepare_data``, ``setup`` and a ``*_dataloader`` hook, each unless it has run already.

        Args:
            request: The request of rank 0.
        """
        opening = request.opening
        try:
            if opening not in self.replies:
                self.replies[opening] = self._run_hooks(request)
            return self.replies[opening]
        except Exception as error:  # noqa: BLE001  # the error of the user's hook is sent to the trainers
            return Problem.of(error, request.hook)

    def forget(self, opening: str) -> None:
        """Forget loaders that cannot be served."""
        del self.loaders[opening], self.replies[opening]

    def leave(self) -> None:
        """Run ``teardown``, if ``setup`` has run."""
        if self._trainer_run is None:
            return
        self.loaders.clear()
        self.replies.clear()
        self._left_trainer_runs.add(self._trainer_run)
        self._trainer_run = None
        if self._module is not None:
            self._module.datamodule.teardown(stage=self._stage)

    def _run_hooks(self, request: OpenRequest) -> SetUp | Loaders:
        module = self._enter(request)
        if not request.loaders:
            return module.set_up_reply()
        module.load_state(request.state, self._load)
        hook = f"{request.loaders}_dataloader"
        seed, epoch = request.seed, request.epoch
        seed_all(hook_seed(seed, hook, epoch))
        with _timed(f"{hook}()"), stand_in().noting_reads() as reads:
            returned = getattr(module.datamodule, hook)()
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

    def _enter(self, request: OpenRequest) -> _LiveModule:
        """Bring the DataModule to where it is on rank 0, and run the hooks of a new ``fit``, ``validate`` and so on."""
        if request.trainer_run in self._left_trainer_runs:
            raise DataSettingsError(
                "Another training run has taken over this data host, which serves one run at a time. Start separate "
                "data hosts for each run."
            )
        if request.trainer_run != self._trainer_run:
            self.leave()
        stand_in().update(request.trainer)
        module = self._module
        if module is None or module.digest != request.datamodule:
            module = _LiveModule(self._load(request.datamodule), request.datamodule)
            self._module = None  # if a hook fails, the next request begins anew
            module.set_values(request.values)
            module.prepare(request)
            for stage in request.earlier:
                module.set_up(stage, request)
                module.datamodule.teardown(stage=stage)
            module.set_up(request.stage, request)
        else:
            module.set_values(request.values)
            if request.trainer_run != self._trainer_run:
                module.prepare(request)
                module.set_up(request.stage, request)
        self._module = module
        self._trainer_run = request.trainer_run
        self._stage = request.stage
        return module

    def _load(self, digest: str) -> Any:
        return load_from_trainers(self._snapshots[digest], "the DataModule of rank 0")


class _LiveModule:
    """A DataModule of rank 0, as it lives here.

    Args:
        datamodule: The DataModule, rebuilt from its snapshot.
        digest: Digest of the snapshot.
    """

    def __init__(self, datamodule: Any, digest: str) -> None:
        self.datamodule = datamodule
        self.digest = digest
        self._values: dict[str, str] = {}  # plain values that rank 0 has set, encoded
        self._is_prepared = False
        self._changed: set[str] = set()
        self._state = ""
        datamodule.trainer = stand_in()

    def set_values(self, values: Mapping[str, str]) -> None:
        """Set the plain values that were set, changed or deleted on rank 0 since the last request."""
        for name in self._values.keys() - values.keys():
            with suppress(AttributeError):
                delattr(self.datamodule, name)
        for name, text in values.items():
            if self._values.get(name) != text:
                setattr(self.datamodule, name, plain_value(text))
        self._values = dict(values)

    def prepare(self, request: OpenRequest) -> None:
        """Run ``prepare_data``, once."""
        if request.prepares and not self._is_prepared:
            seed_all(hook_seed(request.seed, "prepare_data", 0))
            with _timed("prepare_data()"), stand_in().noting_reads() as reads:
                self.datamodule.prepare_data()
            reads.check()
            self._is_prepared = True

    def set_up(self, stage: str, request: OpenRequest) -> None:
        """Run ``setup``, and note which attributes it sets."""
        own = vars(self.datamodule)
        kept = {name: own[name] for name in request.kept if name in own}
        before = {name: (value, plain_json(value)) for name, value in own.items()}
        # Every host, even one that restarts or belongs to a resumed job, must split the data alike.
        seed_all(hook_seed(request.seed, "setup", 0))
        with _timed(f"setup({stage!r})"), stand_in().noting_reads() as reads:
            self.datamodule.setup(stage=stage)  # by its name, as Lightning calls it
        reads.check()
        # Accumulated over all runs of the Trainer: a later setup() may set the same objects again.
        self._changed |= {
            name
            for name, value in own.items()
            if name not in before or before[name][0] is not value or before[name][1] != plain_json(value)
        }
        own.update(kept)
        self._state = ""

    def load_state(self, digest: str, load: Callable[[str], Any]) -> None:
        """Call ``load_state_dict``, once for each state after ``setup``.

        Args:
            digest: Digest of the state; empty: none was loaded.
            load: Returns the object of a digest.
        """
        if digest not in ("", self._state):
            self._state = digest
            self.datamodule.load_state_dict(load(digest))

    def set_up_reply(self) -> SetUp:
        """Return the plain values that ``setup`` has set or changed, and the names of all others."""
        attributes = {}
        missing = []
        for name in sorted(self._changed & vars(self.datamodule).keys()):
            text = plain_json(getattr(self.datamodule, name))
            if text is None:
                missing.append(name)
            else:
                attributes[name] = text
        return SetUp(attributes, missing)


@contextmanager
def _timed(hook: str) -> Iterator[None]:
    """Log the duration of a user's hook, at INFO if it is long. While it runs, trainers log what they wait for."""
    logger.debug("Running %s", hook)
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    logger.log(logging.INFO if seconds >= _SLOW_HOOK_S else logging.DEBUG, "%s took %.1f s", hook, seconds)
