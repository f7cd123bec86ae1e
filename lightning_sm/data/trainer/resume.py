"""The data position in a checkpoint, and what it means for a run of another shape. Pure rules.

A position counts samples, not batches of a rank: it is the same on all ranks, and holds for any number of data hosts,
workers and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_sm.data.protocol.spec import LoaderFacts
from lightning_sm.errors import ResumeError

_VERSION = 1


@dataclass(frozen=True)
class LoaderPosition:
    """One training loader of the run that was saved.

    Attributes:
        name: Where it stood in what ``train_dataloader()`` returned.
        dataset: Description of the dataset.
        identity: Equal for the same data.
        global_batch: Samples (of a batch sampler: batches) per step over all ranks.
        shards: How an iterable dataset is cut; empty for others.
    """

    name: str
    dataset: str
    identity: str
    global_batch: int
    shards: str = ""

    @classmethod
    def of(cls, facts: LoaderFacts, world_size: int, num_shards: int = 0) -> LoaderPosition:
        """Describe a loader.

        Args:
            facts: The loader.
            world_size: Ranks over which it is split.
            num_shards: Virtual shards, if it is an iterable dataset.
        """
        shards = f"{num_shards} shards, {world_size} ranks, batches of {facts.batch_size}"
        if facts.order != "shards":
            shards = ""
        return cls(facts.name, facts.dataset, facts.identity, (facts.batch_size or 1) * world_size, shards)


@dataclass(frozen=True)
class SavedPosition:
    """Where a training stood.

    Attributes:
        seed: Base of all random states.
        epoch: Epoch.
        batches: Batches that every rank had taken in the epoch.
        loaders: The training loaders.
    """

    seed: int
    epoch: int
    batches: int
    loaders: tuple[LoaderPosition, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what goes into a checkpoint."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> SavedPosition:
        """Rebuild from a checkpoint.

        Args:
            state: What ``to_json`` returned.

        Raises:
            ResumeError: It was written by a version that this one does not know.
        """
        fields = dict(state)
        version = fields.pop("version", None)
        if version != _VERSION:
            raise ResumeError(
                f"The checkpoint has a data position of version {version}, this lightning_sm reads version {_VERSION}. "
                "Use the version of lightning_sm that wrote it."
            )
        fields["loaders"] = tuple(LoaderPosition(**loader) for loader in fields["loaders"])
        return cls(**fields)

    def batches_for(self, loaders: Sequence[LoaderPosition]) -> tuple[int, int]:
        """Translate the position for loaders of this run.

        Args:
            loaders: The training loaders of this run.

        Raises:
            ResumeError: They are other data, or their batch sizes changed in different ratios.

        Returns:
            Batches that every rank has taken, rounded down, and the samples that come again because of that.
        """
        if self.batches == 0:
            return 0, 0
        if len(loaders) != len(self.loaders):
            raise ResumeError(
                f"The checkpoint was saved in the middle of an epoch with {len(self.loaders)} training loader(s), and "
                f"there are {len(loaders)} now. Resume with the same, or from a checkpoint at the end of an epoch."
            )
        translated = {self._translated(old, new) for old, new in zip(self.loaders, loaders, strict=True)}
        if len(translated) > 1:
            raise ResumeError(
                f"The checkpoint was saved with {[old.global_batch for old in self.loaders]} samples per step in the "
                f"training loaders, and there are {[new.global_batch for new in loaders]} now: in the middle of an "
                "epoch all must change by the same factor."
            )
        return translated.pop()

    def _translated(self, old: LoaderPosition, new: LoaderPosition) -> tuple[int, int]:
        if old.identity != new.identity:
            raise ResumeError(
                f"The checkpoint was saved in the middle of an epoch over {old.dataset} ({old.name}, identity "
                f"{old.identity}), and the data hosts now serve {new.dataset} ({new.name}, identity {new.identity}). "
                "Resume with the same data, or from a checkpoint at the end of an epoch."
            )
        if old.shards or new.shards:
            if old.shards != new.shards:
                raise ResumeError(
                    f"The checkpoint was saved in the middle of an epoch over an iterable dataset ({old.name}) with "
                    f"{old.shards or 'no shards'}, and there are {new.shards or 'no shards'} now. Resume with the same "
                    "(data_service.virtual_shards), or from a checkpoint at the end of an epoch."
                )
            return self.batches, 0
        # Rounded down, so that no sample is lost; the rest of the division are samples that repeat.
        return divmod(self.batches * old.global_batch, new.global_batch)
