"""The data position in a checkpoint, and its conversion for a run with other ranks or batch sizes. Pure functions.

A position stands for a number of samples, not for batches of a rank: it is the same on all ranks, and valid for any
number of data hosts, workers and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from lightning_sm.data.protocol.spec import LoaderDescription, OrderKind
from lightning_sm.errors import ResumeError

_VERSION = 1

_ORDERS: dict[OrderKind, str] = {
    "sequential": "in its order",
    "shuffled": "shuffled",
    "sampler": "in the order of a sampler",
    "batch_sampler": "in the order of a batch sampler",
    "shards": "in shards",
}


class SamplerOrderId(NamedTuple):
    """An order of the user's sampler in one pass.

    Attributes:
        pass_index: Number of the pass within its epoch.
        stop: Samples (of a batch sampler: batches) after which the order is cut; 0: where the sampler ends.
        digest: Digest of the order.
    """

    pass_index: int
    stop: int
    digest: str


@dataclass(frozen=True)
class LoaderPosition:
    """A training loader, as far as a position depends on it.

    Attributes:
        name: Its place in the value that ``train_dataloader()`` returned.
        dataset: Description of the dataset.
        identity: Equal for the same data.
        global_batch: Samples (of a batch sampler: batches) per step on all ranks together.
        order: Who decides on the order, see ``LoaderDescription``.
        sampler_order: The order of the user's sampler in the epoch, if that decides.
        shards: Shards, ranks and batch size of an iterable dataset; empty for others.
        num_shards: Number of its virtual shards; 0 for others.
    """

    name: str
    dataset: str
    identity: str
    global_batch: int
    order: OrderKind
    sampler_order: SamplerOrderId | None = None
    shards: str = ""
    num_shards: int = 0

    @classmethod
    def of(
        cls,
        description: LoaderDescription,
        world_size: int,
        num_shards: int = 0,
        sampler_order: SamplerOrderId | None = None,
    ) -> LoaderPosition:
        """Describe a loader.

        Args:
            description: The loader.
            world_size: Number of ranks that split the data.
            num_shards: Number of virtual shards, if it is an iterable dataset.
            sampler_order: The order of the user's sampler, if that decides.
        """
        own = cls(
            description.name,
            description.dataset,
            description.identity,
            (description.batch_size or 1) * world_size,
            description.order,
            sampler_order,
        )
        if description.order != "shards":
            return own
        shards = f"{num_shards} virtual shards, world size {world_size}, batch size {description.batch_size}"
        return replace(own, shards=shards, num_shards=num_shards)

    @property
    def order_text(self) -> str:
        """The order, for messages."""
        digest = "" if self.sampler_order is None else f" (digest of its order: {self.sampler_order.digest})"
        return _ORDERS[self.order] + digest


@dataclass(frozen=True)
class SavedPosition:
    """The data position of a training run.

    Attributes:
        seed: Base of all random states.
        epoch: Epoch, from 0.
        batches: Batches of the epoch on which every rank has trained; 0: the next epoch follows.
        loaders: The training loaders.
    """

    seed: int
    epoch: int
    batches: int
    loaders: tuple[LoaderPosition, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values for a checkpoint."""
        return {"version": _VERSION, **msgspec.to_builtins(self)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> SavedPosition:
        """Convert back from JSON values.

        Raises:
            ResumeError: The position has an unknown version, or is malformed.
        """
        fields = dict(state)
        version = fields.pop("version", None)
        if version != _VERSION:
            raise ResumeError(
                f"The checkpoint has a data position of version {version}, but this lightning_sm reads version "
                f"{_VERSION}. Use the version of lightning_sm that saved the checkpoint."
            )
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ResumeError(
                f"The data position in the checkpoint is malformed: {error}. The checkpoint is damaged, or another "
                "program has written it: resume from another one."
            ) from error

    def num_shards(self, world_size: int) -> int | None:
        """Return the number of virtual shards of the run, if ``world_size`` ranks can share them."""
        numbers = (loader.num_shards for loader in self.loaders)
        return next((number for number in numbers if number and number % world_size == 0), None)

    def batches_for(self, loaders: Sequence[LoaderPosition]) -> tuple[int, int]:
        """Convert the position for the training loaders of this run.

        Returns:
            Batches on which every rank has trained, rounded down, and the samples that repeat because of that.

        Raises:
            ResumeError: The data or its order differs, or the batch sizes changed by different factors.
        """
        if self.batches == 0:
            return 0, 0
        if len(loaders) != len(self.loaders):
            raise ResumeError(
                f"The checkpoint was saved within an epoch, and its number of training loaders is {len(self.loaders)}, "
                f"but now it is {len(loaders)}. Resume with the same loaders, or from a checkpoint at the end of an "
                "epoch."
            )
        translated = {self._translate(old, new) for old, new in zip(self.loaders, loaders, strict=True)}
        if len(translated) > 1:
            raise ResumeError(
                f"The checkpoint was saved within an epoch with {[old.global_batch for old in self.loaders]} samples "
                f"per step in the training loaders, but now there are {[new.global_batch for new in loaders]}. Change "
                "all by the same factor, or resume from a checkpoint at the end of an epoch."
            )
        return translated.pop()

    def _translate(self, old: LoaderPosition, new: LoaderPosition) -> tuple[int, int]:
        if old.order != new.order:
            raise _other_order(old, new)
        if old.identity != new.identity:
            raise ResumeError(
                f"The checkpoint was saved within an epoch over {old.dataset} ({old.name}, identity {old.identity}), "
                f"but the data hosts now serve {new.dataset} ({new.name}, identity {new.identity}). Resume with the "
                "same data, or from a checkpoint at the end of an epoch."
            )
        if old.shards or new.shards:
            if old.shards != new.shards:
                raise ResumeError(
                    f"The checkpoint was saved within an epoch over {old.dataset} ({old.name}) with "
                    f"{old.shards or 'no shards'}, but now it has {new.shards or 'no shards'}. Resume with the same "
                    "settings (data_service.virtual_shards), or from a checkpoint at the end of an epoch."
                )
            return self.batches, 0
        if old.sampler_order != new.sampler_order:
            raise _other_order(old, new)
        # Rounded down, so that no sample is lost; the rest of the division are samples that repeat.
        return divmod(self.batches * old.global_batch, new.global_batch)


def _other_order(old: LoaderPosition, new: LoaderPosition) -> ResumeError:
    return ResumeError(
        f"The checkpoint was saved within an epoch over {old.dataset} ({old.name}) {old.order_text}, but now it is "
        f"read {new.order_text}. Resume with the same shuffle and sampler (and batch size, if a batch sampler has its "
        "own), or from a checkpoint at the end of an epoch."
    )


def check_foreign(batches: int, loaders: Sequence[LoaderPosition], world_size: int) -> None:
    """Check that an epoch which began without data hosts can be continued.

    Args:
        batches: Batches of the epoch on which every rank has trained.
        loaders: The training loaders of this run.
        world_size: Number of ranks.

    Raises:
        ResumeError: The order of the rest is not that of this run.
    """
    # On several ranks, Lightning shuffles also where the loader does not.
    other = [loader for loader in loaders if loader.order != "sequential" or world_size > 1]
    if other:
        raise ResumeError(
            f"The checkpoint was saved without data hosts, after batch {batches} of an epoch. Data hosts read "
            f"{other[0].dataset} ({other[0].name}) {other[0].order_text}, which is not the order in which the epoch "
            "began: samples would repeat, and others be missing. Resume from a checkpoint at the end of an epoch, or "
            "without data hosts until then."
        )
