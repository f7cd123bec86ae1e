"""Runs the hooks of rank 0's DataModule on a data host, for ``data_service.hooks=data``."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_sm._lightning import CombinedLoader, replace_dunder_methods
from lightning_sm.data.host.identity import datasets_in, describe_data
from lightning_sm.data.host.parts import REMEDIES, Parts, forget_parts, keep_parts
from lightning_sm.data.host.pickler import Attributes, pickle_object
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.host.world import RankWorld
from lightning_sm.data.protocol.openings import CallResult
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# A hook that takes longer gets a line in the log.
_SLOW_HOOK_S = 10.0

# An order of a million samples, as a sampler may hold it, has 8 MB.
_MAX_RESULT_BYTES = 20_000_000

# What a trainer has itself.
DATAMODULE, TRAINER = "datamodule", "trainer"


@dataclass(frozen=True)
class HookCall:
    """A call of a hook; equal on all data hosts, which then make equal loaders.

    Attributes:
        run: Name of the DataModule.
        hook: Name of the hook.
        arguments: Its arguments, by name.
        datamodule: The DataModule, with the first call; None: the data host has it.
        values: Attributes that were set on rank 0 since the last call.
        removed: Names of those that were deleted there.
        trainer: The Trainer; None: there is none.
        random_states: The random states of rank 0.
        is_of_job: Whether classes and functions of the script go by name.
    """

    run: str
    hook: str
    arguments: dict[str, Any]
    datamodule: Any
    values: dict[str, Any]
    removed: list[str]
    trainer: TrainerView | None
    random_states: Any
    is_of_job: bool

    def __str__(self) -> str:
        """Return the call as code."""
        # Lightning's stages are members of an enumeration.
        return f"{self.hook}({', '.join(repr(getattr(value, 'value', value)) for value in self.arguments.values())})"


@dataclass(frozen=True)
class HookResult:
    """What a call has returned, and what it has changed.

    Attributes:
        returned: What it has returned, such as loaders.
        attributes: The attributes that it has set or changed, as far as they are small.
        missing: Names of the others, which trainers do not get.
        random_states: The random states after the call.
    """

    returned: Any
    attributes: dict[str, Any]
    missing: list[str]
    random_states: Any


class HookCalls:
    """The DataModules of rank 0 that this data host has, and the calls of their hooks."""

    def __init__(self) -> None:
        self._datamodules: dict[str, Any] = {}  # by run
        self._runs: dict[str, str] = {}  # by call
        self._world = RankWorld()

    def run(self, name: str, call: HookCall) -> CallResult:
        """Run a hook.

        Args:
            name: Name of the call.
            call: The call.

        Raises:
            DataSettingsError: The hook splits the data by rank, or what it returned cannot be pickled.
        """
        datamodule = call.datamodule
        if datamodule is None:
            datamodule = self._datamodules[call.run]
        for removed in call.removed:
            vars(datamodule).pop(removed, None)
        for attribute, value in call.values.items():
            set_attribute(datamodule, attribute, value)
        before = Attributes(datamodule, (TRAINER,), by_name=call.is_of_job)
        returned = self._returned(datamodule, call)
        states = random_states()
        changed = Attributes(datamodule, (TRAINER,), by_name=call.is_of_job).changed(before)
        attributes = {attribute: value for attribute, (value, pickled) in changed.items() if pickled is not None}
        missing = sorted(changed.keys() - attributes.keys())
        loaders = _loaders_in(returned)
        parts = Parts({DATAMODULE: datamodule, TRAINER: call.trainer})
        for loader in loaders:
            parts.leave_function(loader.collate_fn)
            parts.leave_function(loader.worker_init_fn)
        pickled = pickle_object(
            HookResult(returned, attributes, missing, states),
            by_name=call.is_of_job,
            named={str(call): returned},
            advice=f"The trainers get the loaders, whose datasets stay here, with their samplers. {REMEDIES}",
            parts=parts,
        ).joined()
        if len(pickled) > _MAX_RESULT_BYTES:
            raise DataSettingsError(
                f"What {call} returns has {len(pickled) / 1e6:.0f} MB without its datasets, and "
                f"{_MAX_RESULT_BYTES / 1e6:.0f} MB at most go to the trainers. Samplers go there: let them hold less, "
                "or compute their order in __iter__. Or set data_service.hooks=trainers, if the trainers have the data."
            )
        self._datamodules[call.run] = datamodule
        self._runs[name] = call.run
        keep_parts(name, parts.found)
        return CallResult(pickled, _compared_fields(call, loaders, missing))

    def _returned(self, datamodule: Any, call: HookCall) -> Any:
        """Call the hook, in the world of rank 0."""
        began = time.monotonic()
        if call.datamodule is None and datamodule.trainer is not None and call.trainer is not None:
            datamodule.trainer.update(call.trainer)  # what the hooks have made refers to this view
        else:
            datamodule.trainer = call.trainer
        set_random_states(call.random_states)
        # Lightning makes some loaders again, from the arguments of their classes.
        with replace_dunder_methods(DataLoader, "dataset"), replace_dunder_methods(BatchSampler):
            if call.trainer is None:
                returned = getattr(datamodule, call.hook)(**call.arguments)
            else:
                self._world.show(0, call.trainer.world_size)
                try:
                    with datamodule.trainer.noting_reads() as reads:
                        returned = getattr(datamodule, call.hook)(**call.arguments)
                finally:
                    self._world.show(0, 1)
                loaders = _loaders_in(returned)
                if not loaders or not all(any(map(_is_distributed, samplers_of(loader))) for loader in loaders):
                    reads.check(str(call))
        seconds = time.monotonic() - began
        logger.log(logging.INFO if seconds >= _SLOW_HOOK_S else logging.DEBUG, "%s took %.1f s", call, seconds)
        return returned

    def keep(self, names: Iterable[str]) -> None:
        """Forget all calls but some, and the DataModules that no other needs."""
        kept = set(names)
        for name in self._runs.keys() - kept:
            del self._runs[name]
            forget_parts(name)
        needed = set(self._runs.values())
        self._datamodules = {run: each for run, each in self._datamodules.items() if run in needed}


def set_attribute(datamodule: Any, name: str, value: Any) -> None:
    """Set an attribute to what it was changed to in another process.

    A list, dict or set is changed in place: a dataset may share it.
    """
    own = vars(datamodule).get(name)
    if isinstance(value, list) and type(own) is type(value):
        own[:] = value
    elif isinstance(value, (dict, set)) and type(own) is type(value):
        own.clear()
        own.update(value)
    else:
        setattr(datamodule, name, value)


def random_states() -> Any:
    """Return the random states of this process, as values of which equal ones have equal pickles."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()


def set_random_states(states: Any) -> None:
    """Set the random states of this process."""
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(torch.from_numpy(of_torch.copy()))


def samplers_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the samplers of a loader, where Lightning looks for them."""
    yield loader.sampler
    yield loader.batch_sampler
    yield getattr(loader.batch_sampler, "sampler", None)


def _is_distributed(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler)


def _loaders_in(returned: Any) -> list[DataLoader[Any]]:
    leaves = returned.flattened if isinstance(returned, CombinedLoader) else tree_leaves(returned)
    return [leaf for leaf in leaves if isinstance(leaf, DataLoader)]


def _compared_fields(call: HookCall, loaders: list[DataLoader[Any]], missing: list[str]) -> dict[str, str]:
    """Return texts that are equal on data hosts that have the same data and the same packages."""
    fields = {f"attributes after {call}": ", ".join(missing)} if missing else {}
    datasets = [dataset for loader in loaders for dataset in datasets_in(loader.dataset)]
    for number, loader in enumerate(loaders):
        of = f"{call}[{number}]" if len(loaders) > 1 else str(call)
        sampler = type(loader.sampler).__name__ if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        fields[f"{of} batches"] = f"batch_size={loader.batch_size}, {sampler}, {_length(loader)} batches"
        own = describe_data(loader.dataset, loader.sampler)
        fields[f"{of} dataset"] = f"{type(loader.dataset).__name__} of {_length(loader.dataset)} ({_digest(own)})"
        listings = {
            name: f"{len(value)} items ({digest})"
            for dataset in datasets_in(loader.dataset)
            if not callable(getattr(dataset, "fingerprint", None))
            for name, value in getattr(dataset, "__dict__", {}).items()
            if (digest := _digest_of_listing(value)) is not None
        }
        fields.update({f"{of} dataset.{name}": text for name, text in listings.items()})
    packages = {type(one).__module__.partition(".")[0] for one in datasets}
    for package in sorted(packages & metadata.packages_distributions().keys()) if packages else ():
        fields[f"package {package}"] = metadata.version(metadata.packages_distributions()[package][0])
    return fields


def _digest_of_listing(value: Any) -> str | None:
    """Return a digest of a list of names, numbers, or tuples of these; None: it is something else."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    first = value[0]
    if not all(isinstance(part, (str, int, Path)) for part in (first if isinstance(first, tuple) else (first,))):
        return None
    try:
        return _digest(value)
    except (TypeError, ValueError):  # other items are no names
        return None


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=_path).encode(), digest_size=8).hexdigest()


def _path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no name")


def _length(value: Any) -> str:
    size: Callable[[Any], int] = len
    try:
        return str(size(value))
    except (TypeError, NotImplementedError):
        return "unknown length"
