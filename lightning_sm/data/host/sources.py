"""The sources that trainers have sent to a data host, and what its workers are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_sm.data.host.snapshot import load_from_trainers
from lightning_sm.data.host.source import WorkerSource
from lightning_sm.data.protocol.calls import Problem
from lightning_sm.data.protocol.openings import Opening


class Sources:
    """The sources in the main process: workers are its forks, and share the memory of their dataset.

    Args:
        descriptor: Returns the memory of a source by its digest.

    Attributes:
        openings: What workers are for, by name.
    """

    def __init__(self, descriptor: Callable[[str], int]) -> None:
        self._descriptor = descriptor
        self.openings: dict[str, Opening] = {}
        self._sources: dict[str, WorkerSource] = {}

    def source(self, opening: str) -> WorkerSource:
        """Return the source of an opening."""
        return self._sources[self.openings[opening].source]

    def descriptor(self, opening: str) -> int:
        """Return the memory of the source of an opening."""
        return self._descriptor(self.openings[opening].source)

    def open(self, opening: Opening) -> Problem | None:
        """Rebuild the source of an opening, unless it is there; return why it cannot be rebuilt, if so."""
        if opening.source not in self._sources:
            try:
                memory = self._descriptor(opening.source)
                self._sources[opening.source] = load_from_trainers(memory, "a dataset of the trainers")
            except Exception as error:  # noqa: BLE001  # also of the user's __setstate__: sent to the trainers
                return Problem.of(error, "the dataset, as it was rebuilt from its pickle")
        self.openings[opening.name] = opening
        return None

    def keep(self, names: Iterable[str]) -> None:
        """Forget all openings but some, and the sources that no other needs."""
        kept = set(names)
        self.openings = {name: opening for name, opening in self.openings.items() if name in kept}
        needed = {opening.source for opening in self.openings.values()}
        self._sources = {digest: source for digest, source in self._sources.items() if digest in needed}
