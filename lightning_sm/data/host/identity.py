"""The identity of a dataset, compared between data hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset, SubsetRandomSampler


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
    except (TypeError, ValueError):  # keys of different lengths, or that NumPy cannot look at
        return f"{len(indices)} keys"
    if array.dtype.kind in "iu":
        array = array.astype("<i8")
    elif array.dtype.kind != "U":
        # Keys of the user's own classes: repr() may show addresses, which differ between hosts.
        return f"{len(indices)} keys"
    return hashlib.blake2b(array.dtype.str.encode() + array.tobytes(), digest_size=8).hexdigest()
