"""The sources that trainers have sent to a data host, and the openings that its workers serve."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lightning_sm.data.host.hook_call import HookCall, HookCalls
from lightning_sm.data.host.snapshot import load_from_trainers
from lightning_sm.data.host.source import WorkerSource
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.openings import CallResult, Opening


class Sources:
    """The sources in the main process, whose forked workers share the datasets' memory.

    Attributes:
        openings: The openings that workers serve, by name.
        snapshots: Descriptors of the pickled sources, by digest, the newest last.
        unpickled: Sources that are unpickled for forked workers, by digest.
    """

    def __init__(self) -> None:
        self.openings: dict[str, Opening] = {}
        self.snapshots: dict[str, int] = {}
        self.unpickled: dict[str, WorkerSource] = {}
        self._calls = HookCalls()

    def take(self, digest: str, fd: int, kept: Sequence[str]) -> None:
        """Add a pickled source, and drop the ones that are no longer needed.

        Args:
            digest: Digest of the source.
            fd: Descriptor of its memory.
            kept: Digests of sources that may still be requested.
        """
        for old in [digest, *(self.snapshots.keys() - set(kept))]:
            if old in self.snapshots:
                os.close(self.snapshots.pop(old))
        self.snapshots[digest] = fd

    def open(self, opening: Opening) -> Failure | CallResult | None:
        """Run an opening's hook call, or unpickle its source for forked workers unless that has already been done.

        Returns:
            The failure, the result of the hook call, or None if workers can start.
        """
        result = None
        where = "unpickling the dataset"
        try:
            if opening.is_call:
                where = "unpickling the DataModule"
                call: HookCall = load_from_trainers(self.snapshots[opening.source], "rank 0's DataModule")
                where = str(call)
                result = self._calls.run(opening.name, call)
            elif not opening.is_spawned and opening.source not in self.unpickled:
                memory = self.snapshots[opening.source]
                self.unpickled[opening.source] = load_from_trainers(memory, "a dataset from the trainers")
        except Exception as error:  # noqa: BLE001  # errors in the user's code are sent to the trainers
            return Failure.of(error, where)
        self.openings[opening.name] = opening
        return result

    def keep(self, names: Iterable[str]) -> None:
        """Forget all openings except these, and the unpickled sources that none of these needs."""
        kept = set(names)
        self.openings = {name: opening for name, opening in self.openings.items() if name in kept}
        self._calls.keep(self.openings)
        needed = {opening.source for opening in self.openings.values()}
        self.unpickled = {digest: source for digest, source in self.unpickled.items() if digest in needed}
