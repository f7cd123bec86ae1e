"""DataModules whose loaders have their workers on data hosts, and whose hooks run there, too, with ``hooks: data``.

With ``hooks: data``, trainers get loaders without datasets.
"""

from __future__ import annotations

import copyreg
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch.utils._pytree import tree_map

from lightning_sm._lightning import CombinedLoader, LightningDataModule
from lightning_sm._random_state import RandomState
from lightning_sm._unlisted import UnlistedDataModule
from lightning_sm.data.host.hook_call import (
    DATAMODULE,
    TRAINER,
    HookCall,
    HookResult,
    distributed_samplers,
    loaders_in,
    set_attribute,
)
from lightning_sm.data.host.pickler import Attributes, PickledObject, pickle_object
from lightning_sm.data.host.stand_ins import REMEDIES, ResultUnpickler
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.feeder_client import FeederClient, HeldOpening
from lightning_sm.data.trainer.remote_loader import LoaderSource, remote_loader
from lightning_sm.data.trainer.same_name import named_as

_STAGES = ("train", "val", "test", "predict")

# Number of calls to keep open per hook, so that data hosts that join late or rejoin also run them. The second-to-last
# call is included, because iterators may still read its loaders.
_NUM_KEPT = 2

# Attributes that this module adds to the user's DataModule.
_OURS = ("_host_hooks", "_service_connection")

_TO_DATA_HOSTS = (
    "With data_service.hooks=data, rank 0's DataModule is pickled for the data hosts before prepare_data(). Create "
    "what cannot be pickled in setup(), which runs there."
)


def run_hooks_on_data_hosts(datamodule: LightningDataModule, connection: ServiceConnection) -> None:
    """Have the data hosts run ``prepare_data``, ``setup``, ``*_dataloader`` and ``teardown`` of a DataModule.

    Args:
        datamodule: The DataModule, which is changed in place.
        connection: The connection to the data hosts.
    """
    # A DataModule from LightningDataModule.from_datasets has none: its datasets are already in this process.
    if _loader_hooks(type(datamodule)):
        vars(datamodule).setdefault("_host_hooks", _HostHooks(datamodule))
        fetch_with(_HasHooksOnDataHosts, datamodule, connection, run_hooks_on_data_hosts)


def fetch_with(mixin: type, datamodule: LightningDataModule, connection: ServiceConnection, again: Any) -> None:
    """Give a DataModule a connection, and its class a mixin and hooks that return remote loaders.

    Args:
        mixin: The mixin, a ``FetchingDataModule``.
        datamodule: The DataModule, which is changed in place.
        connection: The connection to the data hosts.
        again: Changes a copy of the DataModule in the same way, given the copy and a connection.
    """
    vars(datamodule)["_service_connection"] = connection
    own = type(datamodule)
    if issubclass(own, mixin):  # changed before, perhaps with another connection
        return
    hooks = {name: _hook(own, name) for name in _loader_hooks(own)}
    users_class = own._users_class if issubclass(own, FetchingDataModule) else own
    datamodule.__class__ = named_as(own, mixin, own, **hooks, _users_class=users_class, _again=again)


def _loader_hooks(own: type[LightningDataModule]) -> list[str]:
    """Return the names of the ``*_dataloader`` hooks that a DataModule's class defines."""
    names = [f"{stage}_dataloader" for stage in _STAGES]
    # A script can turn a hook off by setting it to None.
    return [name for name in names if getattr(own, name) not in (None, getattr(LightningDataModule, name))]


class FetchingDataModule(UnlistedDataModule):
    """A mixin for loaders with workers on data hosts; it precedes the user's class in the MRO."""

    _users_class: type[LightningDataModule]
    _again: Any
    _service_connection: ServiceConnection
    _host_hooks: Any = None  # a ``_HostHooks``, if hooks run on data hosts

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the user's DataModule: alone for data hosts, or with the connection for a new process."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle's default, which needs this class
            function, arguments = object.__new__, arguments[:1]
        own = tuple(self._users_class if argument is type(self) else argument for argument in arguments)
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name not in _OURS}
        if self._host_hooks is not None and self._host_hooks.travels:
            return (function, own, *rest)
        return (_rebuild, (type(self)._again, self._service_connection, function, own), *rest)


def _rebuild(again: Any, connection: ServiceConnection, function: Any, arguments: tuple[Any, ...]) -> Any:
    datamodule = function(*arguments)
    again(datamodule, connection)
    return datamodule


class _HasHooksOnDataHosts(FetchingDataModule):
    """A mixin that runs hooks on data hosts."""

    def prepare_data(self) -> None:
        """Do nothing: ``setup``, which all ranks call, has the data hosts run this hook."""

    def setup(self, stage: str) -> None:
        """Have the data hosts run ``prepare_data`` and ``setup``."""
        own = self._users_class
        if own.prepare_data is not LightningDataModule.prepare_data:
            self._host_hooks.call("prepare_data", stage, is_alone=not self.prepare_data_per_node)
        self._host_hooks.call("setup", stage, stage=stage)

    def teardown(self, stage: str) -> None:
        """Have the data hosts run ``teardown``."""
        if self._users_class.teardown is not LightningDataModule.teardown:
            self._host_hooks.call("teardown", stage, stage=stage)

    def __getattr__(self, name: str) -> Any:
        """Explain why an attribute is missing."""
        hooks = vars(self).get("_host_hooks")
        if hooks is not None and name in hooks.missing:
            raise AttributeError(
                f"{self._users_class.__name__}.{name} was set on the data hosts, which run the hooks "
                "(data_service.hooks), and was not copied to the trainers, which get only the lengths of datasets and "
                f"other values of at most 64 KB. {REMEDIES}"
            )
        own: Any = super()
        if hasattr(own, "__getattr__"):
            return own.__getattr__(name)
        raise AttributeError(f"{self._users_class.__name__!r} object has no attribute {name!r}")


@dataclass
class _OpenCall:
    """An open hook call, which data hosts that join late or rejoin also run.

    Attributes:
        hook: Name of the hook.
        key: Distinguishes the hook's calls within one run of the Trainer.
        held: The opening of the call.
        pickled: The call.
        loaders: The pickled result of a loader hook; emptied when another run of the Trainer starts.
        changes: Whether the call has changed state that later calls see.
    """

    hook: str
    key: object
    held: HeldOpening
    pickled: PickledObject
    loaders: bytes = b""
    changes: bool = True


class _HostHooks:
    """A rank's client for a DataModule's hooks on the data hosts.

    Args:
        datamodule: The DataModule.

    Attributes:
        missing: Names of the attributes that are not copied to trainers.
        travels: Whether the DataModule is being pickled for data hosts.
    """

    def __init__(self, datamodule: LightningDataModule) -> None:
        self.missing: frozenset[str] = frozenset()
        self.travels = False
        self._datamodule: Any = datamodule
        self._run = ""
        self._known: Attributes | None = None  # the DataModule's attributes on the data hosts
        self._feeder: FeederClient | None = None  # used by the last call
        self._calls: list[_OpenCall] = []  # open calls, in order
        self._num_calls = 0

    @property
    def connection(self) -> ServiceConnection:
        """The connection to the data hosts."""
        return cast(ServiceConnection, self._datamodule._service_connection)

    def call(self, hook: str, key: object, *, is_alone: bool = False, **arguments: Any) -> Any:
        """Have the data hosts run a hook, and return the result; all ranks must call this.

        Args:
            hook: Name of the hook.
            key: Distinguishes between calls of the hook that are open at the same time.
            is_alone: Whether a single data host runs the hook on behalf of all.
            **arguments: Arguments of the hook.

        Raises:
            DataServiceError: The hook failed, or the data hosts returned different results.
        """
        trainer = self._datamodule.trainer
        rank, num_ranks = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        self.connection.open(rank, num_ranks, is_quiet=trainer is not None and trainer.local_rank != 0)
        self._open_again()
        outcome: Any = None
        if trainer is None or trainer.is_global_zero:
            try:
                outcome = self._call(hook, key, arguments, is_alone=is_alone)
            except Exception as error:  # noqa: BLE001  # raised on all ranks, or the others would wait for this one
                outcome = error
        if trainer is not None:
            outcome = trainer.strategy.broadcast(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        self._run, opening, snapshot, before, data = outcome
        if not self._calls or self._calls[-1].held.opening != opening:  # on ranks other than 0
            self._open(hook, key, opening, PickledObject([memoryview(snapshot)]))
        returned = self._take(self._calls[-1], before, data)
        if not is_alone:  # otherwise the other hosts need the whole DataModule with the next call
            self._known = self._attributes()
        return returned

    def again(self, hook: str, key: object) -> Any:
        """Return new copies of an earlier call's loaders; None if there are none or attributes have changed since."""
        if self._datamodule.trainer is None or self._known is None or self._attributes().changed(self._known):
            return None
        call = next((call for call in self._calls if (call.hook, call.key) == (hook, key) and call.loaders), None)
        return None if call is None else self._unpickled(call, call.loaders).returned

    def _call(self, hook: str, key: object, arguments: dict[str, Any], *, is_alone: bool) -> Any:
        """Have the data hosts run a hook; only rank 0 calls this."""
        datamodule, trainer = self._datamodule, self._datamodule.trainer
        by_name = self.connection.is_of_job
        self._run = self._run or secrets.token_hex(8)
        before = RandomState.now()
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
            random_state=before,
            by_name=by_name,
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
        opening = Opening(f"{self._run}/{hook}/{self._num_calls}", pickled.digest, is_call=True, is_alone=is_alone)
        self._open(hook, key, opening, pickled)
        timeout_s = self.connection.settings.startup_timeout_s
        try:
            result = self.connection.feeder.wait_for_source(opening, f"run {call}", timeout_s)
        except Exception:
            self._calls.pop()
            raise
        return self._run, opening, pickled.joined(), before, result

    def _open(self, hook: str, key: object, opening: Opening, pickled: PickledObject) -> None:
        (held,) = self.connection.feeder.open_source(pickled, opening)
        self._calls.append(_OpenCall(hook, key, held, pickled))

    def _close_older(self, hook: str) -> None:
        """Close older calls of a loader hook, unless they have changed state that later calls see."""
        of_hook = [call for call in self._calls if call.hook == hook]
        for call in of_hook[:-_NUM_KEPT]:
            if not call.changes:
                self._calls.remove(call)

    def _open_again(self) -> None:
        """Reopen all calls on a new connection, if the end of a run or an exception has closed the old one."""
        if self._feeder is self.connection.feeder:
            return
        self._feeder = self.connection.feeder
        for call in self._calls:
            (call.held,) = self._feeder.open_source(call.pickled, call.held.opening)

    def _take(self, call: _OpenCall, before: RandomState, data: bytes) -> Any:
        """Apply a call's changes to the DataModule, and return its result."""
        datamodule = self._datamodule
        result = self._unpickled(call, data)
        if call.hook.endswith("_dataloader"):
            call.loaders, call.changes = data, result.changes
            self._close_older(call.hook)
        elif call.hook == "setup":  # another run of the Trainer has started and needs new loaders
            for earlier in self._calls:
                earlier.loaders = b""
        self.missing = (self.missing | frozenset(result.missing)) - result.attributes.keys()
        for name in result.missing:
            vars(datamodule).pop(name, None)  # a stale value would look as if the hook had not run
        for name, value in result.attributes.items():
            set_attribute(datamodule, name, value)
        # Do not overwrite this rank's RNG state if it differs from rank 0's.
        if before.is_same(RandomState.now()):
            result.random_state.restore()
        return result.returned

    def _attributes(self) -> Attributes:
        return Attributes(self._datamodule, (TRAINER, *_OURS), by_name=self.connection.is_of_job)

    def _unpickled(self, call: _OpenCall, data: bytes) -> HookResult:
        datamodule, trainer = self._datamodule, self._datamodule.trainer
        others = {DATAMODULE: datamodule, TRAINER: trainer}
        result: HookResult = ResultUnpickler(data, call.held.opening.name, others).load()
        if trainer is not None:
            _set_ranks(result.returned, trainer)
        return result


def _set_ranks(returned: Any, trainer: Any) -> None:
    """Set this trainer's rank in distributed samplers, which were created for rank 0 on the data hosts."""
    for loader in loaders_in(returned):
        for sampler in distributed_samplers(loader):
            if (sampler.rank, sampler.num_replicas) == (0, trainer.world_size):
                sampler.rank = trainer.global_rank


def _hook(own: type[LightningDataModule], name: str) -> Callable[[FetchingDataModule], Any]:
    def hook(self: FetchingDataModule) -> Any:
        trainer, hooks = self.trainer, self._host_hooks
        if hooks is None:
            loaders = getattr(own, name)(self)
        else:
            key = _reload(trainer)
            loaders = hooks.again(name, key) or hooks.call(name, key)
        ranks = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

        def remote(loader: Any) -> Any:
            return remote_loader(loader, LoaderSource(self._service_connection, f"{name}()", *ranks, trainer))

        if isinstance(loaders, CombinedLoader):
            loaders.flattened = list(map(remote, loaders.flattened))
            return loaders
        return tree_map(remote, loaders)

    hook.__name__ = name
    hook.__doc__ = f"Return the loaders of the user's ``{name}``, with their workers on data hosts."
    return hook


def _reload(trainer: Any) -> str:
    """Return a key for a hook's loaders: the Trainer's function and, if the Trainer reloads loaders, the epoch.

    If the script calls a hook itself, the key is the same, so the script gets copies of the same loaders, and it need
    not call the hook on all ranks.
    """
    if trainer is None:
        return ""
    epoch = trainer.current_epoch if trainer.reload_dataloaders_every_n_epochs else 0
    return f"{trainer.state.fn}-{epoch}"
