"""Runs the hooks of rank 0's DataModule on a data host, for ``data_service.hooks=data``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_sm._lightning import CombinedLoader, replace_dunder_methods
from lightning_sm._random_state import RandomState
from lightning_sm.data.host.identity import compared_fields
from lightning_sm.data.host.pickler import Attributes, pickle_object
from lightning_sm.data.host.stand_ins import LEFT, REMEDIES, Parts
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.host.world import RankWorld
from lightning_sm.data.protocol.openings import CallResult
from lightning_sm.errors import DataSettingsError

# A sampler may hold the order of a million samples, which takes 8 MB.
_MAX_RESULT_BYTES = 20_000_000

# Names of the objects that a result's pickle leaves out, because each trainer uses its own.
DATAMODULE, TRAINER = "datamodule", "trainer"


@dataclass(frozen=True)
class HookCall:
    """A hook call. All data hosts get the same one, so that they create equal loaders.

    Attributes:
        run: Name of the DataModule.
        hook: Name of the hook.
        arguments: Its arguments, by name.
        datamodule: The DataModule in the first call; None in later ones, because the data host already has it.
        values: Attributes that were set on rank 0 since the last call.
        removed: Names of attributes that were deleted on rank 0 since the last call.
        trainer: View of the Trainer, if any.
        random_state: Random state of rank 0.
        by_name: Whether the script's classes and functions are pickled by name.
    """

    run: str
    hook: str
    arguments: dict[str, Any]
    datamodule: Any
    values: dict[str, Any]
    removed: list[str]
    trainer: TrainerView | None
    random_state: RandomState
    by_name: bool

    def __str__(self) -> str:
        """Return the call as code."""
        # Lightning's stages are enum members: show their values.
        return f"{self.hook}({', '.join(repr(getattr(value, 'value', value)) for value in self.arguments.values())})"


@dataclass(frozen=True)
class HookResult:
    """The return value and side effects of a hook call.

    Attributes:
        returned: The return value, such as loaders.
        attributes: Small attributes that the hook set or changed.
        missing: Names of the other attributes that the hook set or changed, which trainers do not get.
        random_state: Random state after the call.
        changes: Whether the call has changed state that later calls see.
    """

    returned: Any
    attributes: dict[str, Any]
    missing: list[str]
    random_state: RandomState
    changes: bool


class HookCalls:
    """This data host's copies of rank 0's DataModules, and the calls to their hooks."""

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
            DataSettingsError: The hook splits the data by rank, or its result cannot be pickled or is too large.
        """
        datamodule = self._datamodules[call.run] if call.datamodule is None else call.datamodule
        for removed in call.removed:
            vars(datamodule).pop(removed, None)
        for attribute, value in call.values.items():
            set_attribute(datamodule, attribute, value)
        before = Attributes(datamodule, (TRAINER,), by_name=call.by_name)
        returned = self._returned(datamodule, call)
        states = RandomState.now()
        changed = Attributes(datamodule, (TRAINER,), by_name=call.by_name).changed(before)
        attributes = {attribute: value for attribute, (value, pickled) in changed.items() if pickled is not None}
        missing = sorted(changed.keys() - attributes.keys())
        loaders = loaders_in(returned)
        parts = Parts({DATAMODULE: datamodule, TRAINER: datamodule.trainer})
        for loader in loaders:
            parts.leave_function(loader.collate_fn)
            parts.leave_function(loader.worker_init_fn)
        changes = bool(changed or call.values or call.removed or call.datamodule is not None)
        pickled = pickle_object(
            HookResult(returned, attributes, missing, states, changes),
            by_name=call.by_name,
            named={str(call): returned},
            advice=f"Trainers get the loaders and their samplers, but datasets stay on the data hosts. {REMEDIES}",
            parts=parts,
        ).joined()
        if len(pickled) > _MAX_RESULT_BYTES:
            raise DataSettingsError(
                f"{call} returns {len(pickled) / 1e6:.0f} MB besides its datasets, but at most "
                f"{_MAX_RESULT_BYTES / 1e6:.0f} MB can be sent to the trainers. Reduce what the samplers hold, or "
                "compute their order in __iter__. Or set data_service.hooks=trainers, if the trainers have the data."
            )
        self._datamodules[call.run] = datamodule
        self._runs[name] = call.run
        LEFT[name] = parts.found
        return CallResult(pickled, compared_fields(str(call), loaders, missing))

    def _returned(self, datamodule: Any, call: HookCall) -> Any:
        """Call the hook as rank 0, and return its result."""
        if call.datamodule is None and datamodule.trainer is not None and call.trainer is not None:
            datamodule.trainer.update(call.trainer)  # objects from earlier hooks refer to this view
        else:
            datamodule.trainer = call.trainer
        call.random_state.restore()
        # Record the loaders' arguments, from which Lightning recreates some loaders.
        with replace_dunder_methods(DataLoader, "dataset"), replace_dunder_methods(BatchSampler):
            if call.trainer is None:
                return getattr(datamodule, call.hook)(**call.arguments)
            self._world.show(0, call.trainer.world_size)
            try:
                with datamodule.trainer.noting_reads() as reads:
                    returned = getattr(datamodule, call.hook)(**call.arguments)
            finally:
                self._world.show(0, 1)
        loaders = loaders_in(returned)
        if not loaders or not all(map(distributed_samplers, loaders)):
            reads.check(str(call))
        return returned

    def keep(self, names: Iterable[str]) -> None:
        """Forget all calls except these, and the DataModules that none of these calls needs."""
        kept = set(names)
        for name in self._runs.keys() - kept:
            del self._runs[name], LEFT[name]
        needed = set(self._runs.values())
        self._datamodules = {run: module for run, module in self._datamodules.items() if run in needed}


def set_attribute(datamodule: Any, name: str, value: Any) -> None:
    """Set an attribute to the value that it has in another process.

    Lists, dicts and sets are changed in place, because a dataset may share them.
    """
    current = vars(datamodule).get(name)
    if isinstance(value, list) and type(current) is type(value):
        current[:] = value
    elif isinstance(value, (dict, set)) and type(current) is type(value):
        current.clear()
        current.update(value)
    else:
        setattr(datamodule, name, value)


def loaders_in(returned: Any) -> list[DataLoader[Any]]:
    """Return the loaders in a hook's return value."""
    leaves = returned.flattened if isinstance(returned, CombinedLoader) else tree_leaves(returned)
    return [leaf for leaf in leaves if isinstance(leaf, DataLoader)]


def distributed_samplers(loader: DataLoader[Any]) -> list[DistributedSampler[Any]]:
    """Return the samplers in a loader that split the data by rank, from all places where Lightning looks for them."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return [sampler for sampler in samplers if isinstance(sampler, DistributedSampler)]
