"""Descriptions of datasets, compared between data hosts to make sure that they have the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

from lightning_sm.data.host.generators import reachable
from lightning_sm.data.host.stand_ins import length_of


def compared_fields(call: str, loaders: Sequence[DataLoader[Any]], missing: Sequence[str]) -> dict[str, str]:
    """Return texts, by name, that are equal on data hosts with the same data and packages.

    Args:
        call: The hook call.
        loaders: The loaders that the hook returned.
        missing: Names of the attributes that the hook set and that trainers do not get.
    """
    fields = {f"attributes after {call}": ", ".join(missing)} if missing else {}
    packages: set[str] = set()
    for number, loader in enumerate(loaders):
        of = f"{call}[{number}]" if len(loaders) > 1 else call
        sampler = type(loader.sampler if loader.batch_sampler is None else loader.batch_sampler).__name__
        samples = f"{length_of(loader.dataset)} samples"
        fields[f"{of} batches"] = f"batch_size={loader.batch_size}, {sampler}, length {length_of(loader)}, of {samples}"
        if isinstance(loader.sampler, SubsetRandomSampler):
            fields[f"{of} sampler.indices"] = _digest(loader.sampler.indices)
        for place, dataset in enumerate(datasets_in(loader.dataset)):
            name = f"{of} dataset" + (f" {place}" if place else "")
            fields.update({name + part: text for part, text in describe_data(dataset).items()})
            packages.add(type(dataset).__module__.partition(".")[0])
    installed = metadata.packages_distributions() if packages else {}
    return fields | {f"package {name}": metadata.version(installed[name][0]) for name in packages & installed.keys()}


def describe_data(dataset: Any) -> dict[str, str]:
    """Describe the parts of a dataset, with texts that are equal for the same data.

    The parts are the class and the result of ``fingerprint()``. If the dataset lacks that method, its lists of names
    or numbers, such as the indices of a ``Subset``, take the result's place: hosts that split the data differently
    would train on each other's validation samples.
    """
    cls = type(dataset)
    texts = {"": f"{cls.__module__}.{cls.__qualname__}"}
    if callable(getattr(dataset, "fingerprint", None)):
        return texts | {".fingerprint()": str(dataset.fingerprint())}
    lists = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if _has_names(value)}
    if isinstance(dataset, Subset):
        lists["indices"] = dataset.indices
    return texts | {f".{name}": _digest(value) for name, value in lists.items()}


def datasets_in(dataset: Any) -> list[Any]:
    """Return a dataset, and the datasets in it that the search for generators also finds, in a fixed order."""
    found = {id(item): item for item in reachable(dataset) if item is dataset or isinstance(item, Dataset)}
    return list(found.values())


def _has_names(value: Any) -> bool:
    """Return whether a value is a list of names, numbers, or tuples of these, judging by its first item."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    first = value[0] if isinstance(value[0], tuple) else value[:1]
    return all(isinstance(part, (str, int, Path)) for part in first)


def _digest(values: Any) -> str:
    try:
        text = json.dumps(values, default=_plain)
    except (TypeError, ValueError):  # items of user classes: repr() may show addresses, which differ between hosts
        return f"{len(values)} items"
    return f"{len(values)} items ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _plain(value: Any) -> Any:
    """Return a path as text, and an array, tensor or range as a list of numbers; ``json`` refuses all other values."""
    return str(value) if isinstance(value, Path) else np.asarray(value).tolist()
