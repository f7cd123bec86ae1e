"""The training samples that cannot be read, as far as a rank knows: of all ranks, and of earlier starts."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_sm.data.ipc.feeder_messages import LoaderPlace
from lightning_sm.data.protocol.calls import BadSample

_NUM_SHOWN = 20


class BadSamples:
    """The bad samples of a run of the Trainer, of which all ranks together may have so many.

    Ranks tell each other with heartbeats: all of them stop when there are too many, within a few seconds.

    Attributes:
        known: They; replaced as a whole, because threads of the links read it.
        limit: How many there may be; 0: none, and nothing is replaced.
    """

    def __init__(self) -> None:
        self.known: tuple[BadSample, ...] = ()
        self.limit = 0
        self._run = ""

    def begin_pass(self, place: LoaderPlace) -> None:
        """Take note of a pass over a training loader; one of another run of the Trainer forgets all samples."""
        run = run_of(place)
        if run != self._run:
            self._run, self.known = run, ()
        self.limit = place.max_bad_samples
        self.merge(BadSample(run, *sample) for sample in place.bad_samples)

    def merge(self, samples: Iterable[BadSample]) -> bool:
        """Take note of samples of this run, and return whether any was new."""
        keys = {(one.loader, one.index) for one in self.known}
        new = {(one.loader, one.index): one for one in samples if one.run == self._run}
        found = [one for key, one in new.items() if key not in keys]
        self.known = (*self.known, *found)
        return bool(found)

    def indices(self, loader: int) -> set[int]:
        """Return the indices of those of a training loader, by its position."""
        return {one.index for one in self.known if one.loader == loader}

    @property
    def are_too_many(self) -> bool:
        """Whether there are more than the user permits."""
        return len(self.known) > self.limit

    def describe(self) -> str:
        """Return a text that lists them, for messages; empty if the user permits none."""
        if not self.limit or not self.known:
            return ""
        lines = [f"  index {one.index} of {one.name}: {one.text}" for one in self.known[:_NUM_SHOWN]]
        more = len(self.known) - len(lines)
        lines += [f"  and {more} more"] if more else []
        head = f"Samples that cannot be read: {len(self.known)} (data_service.max_bad_samples={self.limit}):"
        return "\n".join([head, *lines])


def run_of(place: LoaderPlace) -> str:
    """Return the name of the run of the Trainer that a loader belongs to."""
    return place.request_name.partition("/")[0]
