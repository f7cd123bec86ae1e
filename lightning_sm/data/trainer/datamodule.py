"""The ``RemoteDataModule``, which stands in for the user's DataModule on a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_sm._lightning import BatchSizeFinder, LightningDataModule, check_same_distribution
from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.protocol.failures import first_line
from lightning_sm.data.protocol.spec import LoaderKind
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.bare_loaders import BareLoaders, has_hook
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.data_hosts import DataHosts
from lightning_sm.data.trainer.remote_loader import is_chosen
from lightning_sm.data.trainer.remote_module import remote_datamodule
from lightning_sm.data.trainer.travel import COPIED, TravellingModule
from lightning_sm.errors import DataSettingsError

_LOADER_HOOKS: dict[str, LoaderKind] = {
    "train_dataloader": "train",
    "val_dataloader": "val",
    "test_dataloader": "test",
    "predict_dataloader": "predict",
}

# The user's hooks that run on the trainers. Lightning checks whether they are overridden, so it must find these.
_TRAINER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class RemoteDataModule(LightningDataModule):
    """The user's DataModule on a trainer: fetches its batches from data hosts.

    ``prepare_data``, ``setup``, ``*_dataloader`` and ``teardown`` run on the data hosts. ``on_before_batch_transfer``,
    ``transfer_batch_to_device``, ``on_after_batch_transfer``, ``state_dict`` and ``load_state_dict`` run here. Other
    attributes are those of the wrapped DataModule, including the plain values (numbers, strings, and lists, tuples,
    sets and dicts of these, up to 64 KB) that its ``setup`` set or changed on the data hosts.

    The data hosts get the DataModule of rank 0, pickled, as it is when a run of the Trainer begins and when loaders are
    made.

    Args:
        datamodule: The user's DataModule. Its data need not be accessible from this machine.
        addresses: Addresses of the data hosts, ``host:port``. Default: the data hosts of the job; where there are none,
            as off SageMaker, the result is the DataModule itself.
        settings: Window, timeouts, credentials.
        seed: Base of shuffling and of all random states. Default: that of ``seed_everything``, else 0.
        job: Name of the job; the data hosts must use the same.

    Raises:
        DataSettingsError: There is no address, or the library for ``settings.compression`` is not installed.
        MixedLightningError: The DataModule derives from the other distribution of Lightning.
    """

    def __new__(
        cls,
        datamodule: LightningDataModule,
        addresses: Sequence[str] | ServiceConnection | None = None,
        *,
        settings: DataServiceSettings | None = None,
        job: str = LOCAL_JOB,
        **_: Any,
    ) -> Any:
        """Create an instance whose class has exactly the hooks that the user's DataModule overrides."""
        own = type(datamodule)
        check_same_distribution(own)
        if is_chosen():
            return remote_datamodule(datamodule, addresses, settings or DataServiceSettings(), job)
        if addresses is None and ServiceConnection.of_this_job(settings) is None:
            return datamodule
        return super().__new__(_remote_class(cls, own, [name for name in _LOADER_HOOKS if has_hook(datamodule, name)]))

    def __init__(
        self,
        datamodule: LightningDataModule,
        addresses: Sequence[str] | ServiceConnection | None = None,
        *,
        settings: DataServiceSettings | None = None,
        seed: int | None = None,
        job: str = LOCAL_JOB,
    ) -> None:
        connection = ServiceConnection.of_addresses(addresses, settings or DataServiceSettings(), job)
        if connection is None:  # __new__ has returned the DataModule itself
            raise DataSettingsError("This process belongs to no job with data hosts: give RemoteDataModule addresses.")
        if connection.settings.compression is not None:
            codec_of(connection.settings.compression)  # report a missing library here instead of with the first batch
        # Lightning's own __init__ only sets attributes, and the wrapped DataModule has those already.
        self._datamodule = datamodule
        self._attached: RemoteDataModule | None = None
        self._hosts = DataHosts(datamodule, connection, seed)
        self._take_hooks()

    def __repr__(self) -> str:
        """Return what it is, for logs."""
        return f"RemoteDataModule({type(self._datamodule).__name__}, {self._hosts.connection.addresses})"

    def _take_hooks(self) -> None:
        for name in _TRAINER_HOOKS:
            setattr(self, name, getattr(self._datamodule, name))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped DataModule."""
        if name.startswith("__") or name == "_datamodule":
            raise AttributeError(name)
        try:
            value = getattr(self._datamodule, name)
        except AttributeError as error:
            if self._attached is not None:
                return getattr(self._attached, name)
            raise self._no_attribute(name) from error
        if value is None and name in self._hosts.module.missing:  # a default of the class
            raise self._no_attribute(name)
        return value

    def _no_attribute(self, name: str) -> AttributeError:
        return AttributeError(
            f"{type(self._datamodule).__name__} has no attribute {name!r} on a trainer. prepare_data() and setup() run "
            f"on the data hosts only. What setup() sets there is copied to the trainers if it is plain ({COPIED})."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped DataModule, whose hooks and ``state_dict`` read it, unless it is our own."""
        if name.startswith("_") or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._datamodule if self._attached is None else self._attached, name, value)

    def keep_attached(self, attached: LightningDataModule | None) -> None:
        """Keep what a Trainer has attached, as it does in a call that gets loaders, of which this is the stand-in.

        Attributes and the state in checkpoints are then those of the attached DataModule.

        Args:
            attached: The DataModule of the Trainer's last call, if there was one.
        """
        if not isinstance(attached, RemoteDataModule) or attached is self:
            return
        self._attached = attached._attached if isinstance(attached._datamodule, BareLoaders) else attached
        self._take_name()

    def _take_name(self) -> None:
        """Take the class name under which checkpoints have the state."""
        if self._attached is not None:
            type(self).__qualname__ = type(self._attached).__qualname__

    def __reduce__(self) -> Any:
        """Pickle what does not belong to this process; unpickling creates the class again."""
        # The DataModule is in the state, not an argument: it refers to the Trainer, and the Trainer to this object. Its
        # hooks, which may be attributes of it and not of its class, decide the class, so that they are one.
        hooks = [name for name in _LOADER_HOOKS if name in vars(type(self))]
        arguments = (type(self._datamodule), hooks, self._hosts.connection, self._hosts.seed)
        return _rebuild, arguments, {"_datamodule": self._datamodule, "_attached": self._attached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the wrapped DataModule, which refers back to this object.

        Args:
            state: The state that ``__reduce__`` returned.
        """
        self.__dict__.update(state)
        self._hosts.module = TravellingModule.of(self._datamodule)
        self._take_hooks()
        self._take_name()

    @property
    def trainer(self) -> Any:
        """The Trainer, once Lightning has attached it, also as the wrapped DataModule sees it."""
        return self._datamodule.trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._datamodule.trainer = trainer

    @property
    def hparams(self) -> Any:
        """Hyperparameters of the wrapped DataModule."""
        return (self._attached or self._datamodule).hparams

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters of the wrapped DataModule, as ``save_hyperparameters`` recorded them."""
        return (self._attached or self._datamodule).hparams_initial

    def setup(self, stage: str = "fit") -> None:
        """Connect to the data hosts, and wait until the first one has run the user's ``setup``.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            DataServiceError: The data hosts are unreachable, they serve different data, or the user's code failed
                there.
        """
        trainer = self.trainer
        if trainer is not None:
            if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
                raise DataSettingsError(
                    "BatchSizeFinder changes the batch size between steps of one run, but the data hosts build the "
                    "batches ahead. Find it in a run without data hosts, and pass it as an argument."
                )
            if self._hosts.progress not in trainer.callbacks:
                own = self._hosts
                trainer.callbacks[:0] = [own.progress, own.last_step, own.connection.reporter]
        self._hosts.set_up(stage)

    def teardown(self, stage: str) -> None:
        """Disconnect from the data hosts, which run the user's ``teardown`` when no trainer needs them.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        self._hosts.end_run()
        if self._hosts.connection.closes_on_teardown:
            self.close()

    def on_exception(self, exception: BaseException) -> None:
        """Disconnect from the data hosts: after an exception Lightning does not call ``teardown``.

        Args:
            exception: The exception that ended the training.
        """
        try:
            self._datamodule.on_exception(exception)
        finally:
            self.close(f"{type(exception).__name__}: {first_line(str(exception))}", is_success=False)

    def close(self, outcome: str = "finished", *, is_success: bool = True) -> None:
        """Disconnect this rank from the data hosts, and stop its feeder process.

        Args:
            outcome: How the training ended, for the logs of the data hosts.
            is_success: Whether it had all the batches that it needed: a data host that could not open its data has
                failed only if the training has.
        """
        self._hosts.end_run()
        self._hosts.connection.close(outcome, is_success=is_success)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped DataModule."""
        return (self._attached or self._datamodule).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped DataModule.

        Args:
            state_dict: A state that ``state_dict`` returned.
        """
        if self._attached is not None:
            self._attached.load_state_dict(state_dict)
            return
        self._datamodule.load_state_dict(state_dict)
        # On the data hosts, too: there it may change what setup() has made.
        self._hosts.module.state = state_dict


def _loader_hook(name: str) -> Callable[[RemoteDataModule], Any]:
    def hook(self: RemoteDataModule) -> Any:
        return self._hosts.loaders(_LOADER_HOOKS[name])

    hook.__name__ = name
    hook.__doc__ = f"Return loaders for the batches of the user's ``{name}`` on the data hosts."
    return hook


def _remote_class(base: type[RemoteDataModule], own: type, hooks: Sequence[str]) -> type[RemoteDataModule]:
    """Return the class of the stand-in for a DataModule of a class, which overrides these ``*_dataloader`` hooks."""
    # Checkpoints store the state of a DataModule under its class name, which must not depend on data hosts. The
    # private module hides the class from jsonargparse, which searches DataModules by name.
    names = {"__qualname__": own.__qualname__, "__module__": f"{__name__}._wrapped", "__doc__": own.__doc__}
    return type(own.__name__, (base,), {**{name: _loader_hook(name) for name in hooks}, **names})


def _rebuild(own: type, hooks: Sequence[str], connection: ServiceConnection, seed: int | None) -> RemoteDataModule:
    module: RemoteDataModule = object.__new__(_remote_class(RemoteDataModule, own, hooks))
    module.__init__(object.__new__(own), connection, seed=seed)  # type: ignore[misc]
    return module
