"""The identity of a dataset, compared between data hosts, and between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset, SubsetRandomSampler

from lightning_sm.data.plan.samples import digest
from lightning_sm.data.plan.seeds import encode_key
from lightning_sm.errors import DataSettingsError


def describe_data(dataset: Any, sampler: Any = None) -> list[str]:
    """Return texts that are equal for the same data.

    The texts cover the class and, if there is one, the ``fingerprint()`` of the dataset and of each dataset in its
    attributes. They also cover the indices that ``Subset`` and ``SubsetRandomSampler`` select: hosts that split the
    data differently would train on each other's validation samples.

    Args:
        dataset: The dataset.
        sampler: The sampler of single samples.
    """
    texts = [text for one in datasets_in(dataset) for text in _texts(one)]
    if isinstance(sampler, SubsetRandomSampler):
        texts.append(_digest(sampler.indices))
    return texts


def datasets_in(dataset: Any) -> list[Any]:
    """Return a dataset, and the datasets in its attributes, in a fixed order."""
    return list(_walk(dataset, set()))


def _texts(dataset: Any) -> Iterator[str]:
    cls = type(dataset)
    yield f"{cls.__module__}.{cls.__qualname__}"
    fingerprint = getattr(dataset, "fingerprint", None)
    yield str(fingerprint() if callable(fingerprint) else None)
    if isinstance(dataset, Subset):
        yield _digest(dataset.indices)


def _walk(dataset: Any, seen: set[int]) -> Iterator[Any]:
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    yield dataset
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for item in _items(value):
            if isinstance(item, Dataset):
                yield from _walk(item, seen)


def _items(value: Any) -> list[Any]:
    """Return the items of a container of datasets, such as that in a ``ConcatDataset``; else the value itself."""
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values()) if isinstance(value, dict) else value
        # Look only at the first item: it may be a list of a million files.
        return list(items) if items and isinstance(items[0], Dataset) else []
    return [value]


def _digest(indices: Any) -> str:
    try:
        array = np.asarray(indices)
        if array.dtype.kind in "iu":
            return digest(array)
        return hashlib.blake2b(encode_key(list(indices)), digest_size=8).hexdigest()
    except (TypeError, ValueError, DataSettingsError):
        # Keys of the user's own classes: repr() may show addresses, which differ between hosts.
        return f"{len(indices)} keys"
