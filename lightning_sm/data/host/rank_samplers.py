"""Samplers that split the data by rank: on a data host, which serves all ranks, they must yield all of it."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_sm.errors import DataSettingsError

_ADVICE = (
    "Leave num_replicas and rank out, or pass num_replicas=1 and rank=0: a data host is a world of one, and the data "
    "service splits what the sampler yields over the ranks."
)


def splits_by_rank(sampler: Any) -> bool:
    """Return whether a sampler splits the data: it derives from ``DistributedSampler``, or knows its rank."""
    return isinstance(sampler, DistributedSampler) or (hasattr(sampler, "rank") and hasattr(sampler, "num_replicas"))


def has_torchs_split(sampler: Any) -> bool:
    """Return whether nothing but torch's ``DistributedSampler`` decides the order: a subclass may only add to it."""
    own = type(sampler)
    return isinstance(sampler, DistributedSampler) and all(
        getattr(own, name) is getattr(DistributedSampler, name) for name in ("__iter__", "__len__", "set_epoch")
    )


def make_whole(sampler: Any, name: str) -> bool:
    """Let a sampler that splits the data yield all of it, and return whether that took a change.

    Args:
        sampler: The sampler. It is changed in place: the DataModule of a data host is a copy.
        name: Name of the loader, for messages.

    Raises:
        DataSettingsError: It would yield only a part.
    """
    if sampler.num_replicas == 1:
        return False
    if not isinstance(sampler, DistributedSampler) or _sizes_of(sampler) != (sampler.num_samples, sampler.total_size):
        raise DataSettingsError(
            f"The {type(sampler).__name__} of {name} is that of rank {sampler.rank} of {sampler.num_replicas}, and "
            f"would yield only a part of the data. {_ADVICE}"
        )
    sampler.num_replicas, sampler.rank = 1, 0
    sampler.num_samples = sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]  # torch takes it, too
    return True


def check_whole(num_yielded: int, num_samples: int, name: str) -> None:
    """Check that a sampler which ``make_whole`` has changed yields all of the data.

    Raises:
        DataSettingsError: It has chosen its part beforehand.
    """
    if num_yielded < num_samples:
        raise DataSettingsError(
            f"The sampler of {name} yields {num_yielded} of {num_samples} samples, as if it were "
            f"that of one rank. {_ADVICE}"
        )


def _sizes_of(sampler: DistributedSampler[Any]) -> tuple[int, int]:
    """Return the samples of one rank and of all ranks, as torch computes them."""
    num_samples, num_replicas = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]  # as above
    if sampler.drop_last and num_samples % num_replicas:
        num_samples -= num_replicas
    per_rank = math.ceil(num_samples / num_replicas)
    return per_rank, per_rank * num_replicas
