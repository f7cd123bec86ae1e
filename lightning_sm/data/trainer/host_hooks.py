"""A DataModule whose hooks run on the data hosts (``hooks: data``): trainers get loaders without their datasets."""

from __future__ import annotations

import copyreg
import pickle
import secrets
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler

from lightning_sm._lightning import CombinedLoader, LightningDataModule
from lightning_sm._unlisted import UnlistedDataModule
from lightning_sm.data.host.hook_call import (
    DATAMODULE,
    TRAINER,
    HookCall,
    HookResult,
    random_states,
    samplers_of,
    set_attribute,
    set_random_states,
)
from lightning_sm.data.host.parts import REMEDIES, ResultUnpickler
from lightning_sm.data.host.pickler import Attributes, PickledObject, pickle_object
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.trainer.connection import ServiceConnection

STAGES = ("train", "val", "test", "predict")

# Of the calls of a hook, the last two stay open: those that a data host runs that joins late, or again. Iterators may
# still read the loaders of the last but one.
_NUM_KEPT = 2

# Attributes of ours: this one's, and that of a ``RemoteDataModule``.
_OURS = ("_host_hooks", "_connection")

_TO_DATA_HOSTS = (
    "With data_service.hooks=data, data hosts get the DataModule of rank 0, pickled, before prepare_data(). Create "
    "what cannot be pickled in setup(), which runs there."
)


def run_hooks_on_data_hosts(datamodule: LightningDataModule, connection: ServiceConnection) -> None:
    """Let the data hosts run ``prepare_data``, ``setup``, ``*_dataloader`` and ``teardown`` of a DataModule.

    Args:
        datamodule: The DataModule, which stays the same object.
        connection: The connection to the data hosts.
    """
    if isinstance(datamodule, _HasHooksOnDataHosts):
        datamodule._host_hooks.connection = connection
        return
    own = type(datamodule)
    hooks = {
        f"{stage}_dataloader": _hook(f"{stage}_dataloader") for stage in STAGES if has_hook(own, f"{stage}_dataloader")
    }
    if not hooks:  # LightningDataModule.from_datasets: the datasets are here
        return
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    datamodule.__class__ = type(own.__name__, (_HasHooksOnDataHosts, own), {**hooks, **names, "_own_class": own})
    vars(datamodule)["_host_hooks"] = _HostHooks(datamodule, connection)


def has_hook(owner: Any, name: str) -> bool:
    """Return whether the class of a DataModule has a ``*_dataloader`` hook of its own.

    Args:
        owner: The class.
        name: Name of the hook.
    """
    hook = getattr(owner, name, None)  # None: a script has switched it off
    return callable(hook) and getattr(hook, "__func__", hook) is not getattr(LightningDataModule, name)


def users_class(cls: type) -> type:
    """Return the class whose hooks run on data hosts; any other class as it is."""
    return cls._own_class if issubclass(cls, _HasHooksOnDataHosts) else cls


class _HasHooksOnDataHosts(UnlistedDataModule):
    """The part of a DataModule whose hooks run on data hosts, before the user's class."""

    _own_class: type[LightningDataModule]
    _host_hooks: _HostHooks

    def prepare_data(self) -> None:
        """Leave it to ``setup``, which all ranks call."""

    def setup(self, stage: str) -> None:
        """Let the data hosts run ``prepare_data`` and ``setup``."""
        own = self._own_class
        if own.prepare_data is not LightningDataModule.prepare_data:
            self._host_hooks.call("prepare_data", stage, is_alone=not self.prepare_data_per_node)
        self._host_hooks.call("setup", stage, stage=stage)

    def teardown(self, stage: str) -> None:
        """Let the data hosts run ``teardown``."""
        if self._own_class.teardown is not LightningDataModule.teardown:
            self._host_hooks.call("teardown", stage, stage=stage)

    def __getattr__(self, name: str) -> Any:
        """Say why an attribute is missing."""
        hooks = vars(self).get("_host_hooks")
        if hooks is not None and name in hooks.missing:
            raise AttributeError(
                f"{self._own_class.__name__}.{name} was set on the data hosts, which run the hooks "
                "(data_service.hooks), and trainers do not get it: of datasets they get the lengths, and other values "
                f"up to 64 KB. {REMEDIES}"
            )
        own: Any = super()
        if hasattr(own, "__getattr__"):
            return own.__getattr__(name)
        raise AttributeError(f"{self._own_class.__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as the user's DataModule, for data hosts, or with the connection, for a process that is started."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle's own, which wants the object's class
            function = object.__new__
        own = tuple(self._own_class if argument is type(self) else argument for argument in arguments)
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name not in _OURS}
        if self._host_hooks.travels:
            return (function, own, *rest)
        return (_rebuild, (self._host_hooks.connection, function, own), *rest)


def _rebuild(connection: ServiceConnection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    datamodule = function(*arguments)
    run_hooks_on_data_hosts(datamodule, connection)
    return datamodule


class _HostHooks:
    """The hooks of a DataModule, as a rank calls them.

    Args:
        datamodule: The DataModule.
        connection: The connection to the data hosts.

    Attributes:
        missing: Names of the attributes that trainers do not get.
        travels: Whether the DataModule is being pickled for data hosts.
    """

    def __init__(self, datamodule: LightningDataModule, connection: ServiceConnection) -> None:
        self.connection = connection
        self.missing: frozenset[str] = frozenset()
        self.travels = False
        self._datamodule: Any = datamodule
        self._run = ""
        self._known: Attributes | None = None  # as the data hosts have them
        self._feeder: object = None
        # By name: the calls that are open, in their order.
        self._calls: dict[str, tuple[Opening, PickledObject, Callable[[], object]]] = {}
        self._results: dict[str, bytes] = {}
        self._changeless: set[str] = set()  # calls that have changed no attribute
        self._num_calls = 0

    def call(self, hook: str, key: object, *, is_alone: bool = False, **arguments: Any) -> Any:
        """Let the data hosts run a hook, and return what it returned; a collective call.

        Args:
            hook: Name of the hook.
            key: What tells its calls apart that are open at the same time.
            is_alone: Whether one data host runs it for all.
            **arguments: Its arguments.

        Raises:
            DataServiceError: It failed, or the data hosts returned different results.
        """
        trainer = self._datamodule.trainer
        self.connection.open(trainer)
        self._open_again()
        outcome: Any = None
        if trainer is None or trainer.is_global_zero:
            try:
                outcome = self._call(hook, key, arguments, is_alone=is_alone)
            except Exception as error:  # noqa: BLE001  # raised on all ranks, which would wait for this one
                outcome = error
        if trainer is not None:
            outcome = trainer.strategy.broadcast(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        self._run, opening, snapshot, before, result = outcome
        if opening.name not in self._calls:
            self._open(opening, PickledObject.of_snapshot(snapshot))
        returned = self._take(opening.name, before, result)
        if not is_alone:  # the other hosts get the DataModule with the next call
            self._known = self._attributes()
        return returned

    def again(self, hook: str, key: object) -> Any:
        """Return new loaders of an earlier call of this run of the Trainer; None: none has the same attributes."""
        if self._datamodule.trainer is None or self._known is None or self._attributes().changed(self._known):
            return None
        name = f"{self._run}/{hook}/{key}"
        found = next((one for one in self._results if one.rpartition("/")[0] == name), None)
        return None if found is None else self._unpickled(found, self._results[found]).returned

    def _call(self, hook: str, key: object, arguments: dict[str, Any], *, is_alone: bool) -> Any:
        """Let the data hosts run a hook, on rank 0."""
        datamodule, trainer = self._datamodule, self._datamodule.trainer
        by_name = self.connection.is_of_job
        self._run = self._run or secrets.token_hex(8)
        before = random_states()
        changed: dict[str, Any] = {}
        own = self._attributes()
        if self._known is not None:
            changed = {name: value for name, (value, _) in own.changed(self._known).items()}
        call = HookCall(
            run=self._run,
            hook=hook,
            arguments=arguments,
            datamodule=datamodule if self._known is None else None,
            values=changed,
            removed=sorted((self._known or own).keys() - own.keys()),
            trainer=None if trainer is None else TrainerView.of(trainer),
            random_states=before,
            is_of_job=by_name,
        )
        self.travels = True
        try:
            pickled = pickle_object(
                call,
                by_name=by_name,
                named={
                    f"{type(datamodule).__name__}.{name}": value
                    for name, value in (changed or vars(datamodule)).items()
                    if name not in _OURS
                },
                advice=_TO_DATA_HOSTS,
            )
        finally:
            self.travels = False
        self._num_calls += 1
        name = f"{self._run}/{hook}/{key}/{self._num_calls}"
        opening = Opening(name, pickled.digest, is_call=True, is_alone=is_alone)
        self._open(opening, pickled)
        settings = self.connection.settings
        result = self.connection.feeder.wait_for_source(opening, f"run {call}", settings.startup_timeout_s)
        return self._run, opening, pickled.joined(), before, result

    def _open(self, opening: Opening, pickled: PickledObject) -> None:
        feeder = self.connection.feeder
        feeder.open_source(opening, pickled)
        close = weakref.finalize(self, feeder.close_source, opening)
        close.atexit = False
        self._calls[opening.name] = opening, pickled, close

    def _close_older(self, hook: str) -> None:
        """Close the older calls of a hook for loaders, unless they have changed what later calls find."""
        of_hook = [name for name in self._calls if name.split("/")[1] == hook and hook.endswith("_dataloader")]
        for name in self._changeless.intersection(of_hook[:-_NUM_KEPT]):
            self._changeless.discard(name)
            self._results.pop(name, None)
            self._calls.pop(name)[-1]()

    def _open_again(self) -> None:
        """Open all calls on a new connection: the old one has ended with a run of the Trainer, or with an exception."""
        if self._feeder is self.connection.feeder:
            return
        self._feeder = self.connection.feeder
        for opening, pickled, _ in list(self._calls.values()):
            self._open(opening, pickled)

    def _take(self, call: str, before: Any, data: bytes) -> Any:
        """Take over what a call has changed, and return what it returned."""
        datamodule = self._datamodule
        result = self._unpickled(call, data)
        hook = call.split("/")[1]
        self._close_older(hook)
        if not result.attributes and not result.missing:
            self._changeless.add(call)
        if hook == "setup":  # another run of the Trainer, which makes its loaders itself
            self._results.clear()
        elif hook.endswith("_dataloader"):
            self._results[call] = data
        self.missing = (self.missing | frozenset(result.missing)) - result.attributes.keys()
        for name in result.missing:
            vars(datamodule).pop(name, None)  # it must not look as if the hook had not run
        for name, value in result.attributes.items():
            set_attribute(datamodule, name, value)
        # A rank with random numbers of its own keeps them.
        if pickle.dumps(before) == pickle.dumps(random_states()):
            set_random_states(result.random_states)
        return result.returned

    def _attributes(self) -> Attributes:
        return Attributes(self._datamodule, (TRAINER, *_OURS), by_name=self.connection.is_of_job)

    def _unpickled(self, call: str, data: bytes) -> HookResult:
        datamodule, trainer = self._datamodule, self._datamodule.trainer
        result: HookResult = ResultUnpickler(data, call, {DATAMODULE: datamodule, TRAINER: trainer}).load()
        if trainer is not None:
            _set_ranks(result.returned, trainer)
        return result


def _set_ranks(returned: Any, trainer: Any) -> None:
    """Give the samplers that split the data by rank the rank of this trainer: on data hosts they saw that of rank 0."""
    leaves = returned.flattened if isinstance(returned, CombinedLoader) else tree_leaves(returned)
    for leaf in leaves:
        for sampler in samplers_of(leaf) if hasattr(leaf, "batch_sampler") else ():
            if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) == (
                0,
                trainer.world_size,
            ):
                sampler.rank = trainer.global_rank


def _hook(name: str) -> Callable[[_HasHooksOnDataHosts], Any]:
    def hook(self: _HasHooksOnDataHosts) -> Any:
        hooks, key = self._host_hooks, _reload(self.trainer)
        return hooks.again(name, key) or hooks.call(name, key)

    hook.__name__ = name
    hook.__doc__ = f"Return the loaders that ``{name}`` returned on the data hosts."
    return hook


def _reload(trainer: Any) -> str:
    """Return what names the loaders of a hook: a Trainer's run, and the epoch if it reloads them.

    A script's own call of a hook gets new loaders of the same call. It need not be one of all ranks.
    """
    if trainer is None:
        return ""
    epoch = trainer.current_epoch if trainer.reload_dataloaders_every_n_epochs else 0
    return f"{trainer.state.fn}-{epoch}"
