"""The sources that trainers have sent to a data host, and what its workers are for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lightning_sm.data.host.hook_call import HookCall, HookCalls
from lightning_sm.data.host.snapshot import load_from_trainers
from lightning_sm.data.host.source import WorkerSource
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.openings import CallResult, Opening


class Sources:
    """The sources in the main process: workers are its forks, and share the memory of their dataset.

    Attributes:
        openings: What workers are for, by name.
        snapshots: Descriptors of the pickled sources, by digest, the newest last.
        unpickled: Those that are open for forks, by digest.
    """

    def __init__(self) -> None:
        self.openings: dict[str, Opening] = {}
        self.snapshots: dict[str, int] = {}
        self.unpickled: dict[str, WorkerSource] = {}
        self._calls = HookCalls()

    def take(self, digest: str, fd: int, kept: Sequence[str]) -> None:
        """Take a pickled source.

        Args:
            digest: Its digest.
            fd: Its memory.
            kept: Digests of those that may still be requested.
        """
        for old in [digest, *(self.snapshots.keys() - set(kept))]:
            if old in self.snapshots:
                os.close(self.snapshots.pop(old))
        self.snapshots[digest] = fd

    def open(self, opening: Opening) -> Failure | CallResult | None:
        """Rebuild the source of an opening for forks, unless it is there; run the hook if it is the call of one.

        Returns:
            Why that is not possible, if so; else the result of the call, if it is one.
        """
        result = None
        where = "unpickling the dataset"
        try:
            if opening.is_call:
                where = "unpickling the DataModule"
                call: HookCall = load_from_trainers(self.snapshots[opening.source], "the DataModule of rank 0")
                where = str(call)
                result = self._calls.run(opening.name, call)
            elif not opening.is_spawned and opening.source not in self.unpickled:
                memory = self.snapshots[opening.source]
                self.unpickled[opening.source] = load_from_trainers(memory, "a dataset of the trainers")
        except Exception as error:  # noqa: BLE001  # of the user's code: sent to the trainers
            return Failure.of(error, where)
        self.openings[opening.name] = opening
        return result

    def keep(self, names: Iterable[str]) -> None:
        """Forget all openings but some, and the sources that no other needs."""
        kept = set(names)
        self.openings = {name: opening for name, opening in self.openings.items() if name in kept}
        self._calls.keep(self.openings)
        needed = {opening.source for opening in self.openings.values()}
        self.unpickled = {digest: source for digest, source in self.unpickled.items() if digest in needed}
