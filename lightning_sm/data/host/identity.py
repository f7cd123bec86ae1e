"""The identity of a dataset, compared between data hosts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

from lightning_sm.data.host.parts import length_of


def compared_fields(call: str, loaders: Sequence[DataLoader[Any]], missing: Sequence[str]) -> dict[str, str]:
    """Return texts that are equal on data hosts that have the same data and the same packages.

    Args:
        call: The call of a hook.
        loaders: The loaders that it has returned.
        missing: Names of the attributes that it has set, and that trainers do not get.
    """
    fields = {f"attributes after {call}": ", ".join(missing)} if missing else {}
    packages: set[str] = set()
    for number, loader in enumerate(loaders):
        of = f"{call}[{number}]" if len(loaders) > 1 else call
        sampler = type(loader.sampler if loader.batch_sampler is None else loader.batch_sampler).__name__
        fields[f"{of} batches"] = f"batch_size={loader.batch_size}, {sampler}, length {length_of(loader)}"
        own = describe_data(loader.dataset, loader.sampler)
        name = type(loader.dataset).__name__
        fields[f"{of} dataset"] = f"{name}, length {length_of(loader.dataset)} ({_digest_of_json(own)})"
        for dataset in datasets_in(loader.dataset):
            packages.add(type(dataset).__module__.partition(".")[0])
            fields.update({f"{of} dataset.{name}": text for name, text in _listings(dataset)})
    installed = metadata.packages_distributions() if packages else {}
    return fields | {f"package {one}": metadata.version(installed[one][0]) for one in packages & installed.keys()}


def _listings(dataset: Any) -> Iterator[tuple[str, str]]:
    """Yield the lists of names, numbers, or tuples of these, in a dataset that does not say what must be equal."""
    if callable(getattr(dataset, "fingerprint", None)):
        return
    for name, value in getattr(dataset, "__dict__", {}).items():
        if not isinstance(value, (list, tuple)) or not value:
            continue
        first = value[0] if isinstance(value[0], tuple) else value[:1]
        if not all(isinstance(part, (str, int, Path)) for part in first):
            continue
        try:
            yield name, f"{len(value)} items ({_digest_of_json(value)})"
        except (TypeError, ValueError):  # other items are no names
            continue


def _digest_of_json(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=_path).encode(), digest_size=8).hexdigest()


def _path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no name")


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
