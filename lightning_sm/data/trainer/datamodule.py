"""The ``RemoteDataModule``, which stands in for the user's DataModule on a trainer."""

from __future__ import annotations

import inspect
import json
import logging
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from lightning_sm._lightning import BatchSizeFinder, LightningDataModule, rank_zero_only
from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.protocol.failures import first_line
from lightning_sm.data.protocol.plain_values import plain_value
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.data_hosts import DataHosts
from lightning_sm.errors import DataSettingsError, WireError

logger = logging.getLogger(__name__)
_warn_once = rank_zero_only(logger.warning)

_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")

# The user's hooks that run on the trainers. Lightning checks whether they are overridden, so it must find these.
_TRAINER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

# What a data host may replace on the class of the DataModule: defaults such as ``num_classes = None``, never a hook.
_PLAIN = (type(None), bool, int, float, str, list, tuple, set, dict)
_COPIED = "numbers, strings, and lists, tuples, sets and dicts of these, up to 64 KB"


class RemoteDataModule(LightningDataModule):
    """The user's DataModule on a trainer: fetches its batches from data hosts.

    ``prepare_data``, ``setup``, ``*_dataloader`` and ``teardown`` run on the data hosts. ``on_before_batch_transfer``,
    ``transfer_batch_to_device``, ``on_after_batch_transfer``, ``state_dict`` and ``load_state_dict`` run here. Other
    attributes are those of the wrapped DataModule, including the plain values (numbers, strings, and lists, tuples,
    sets and dicts of these, up to 64 KB) that its ``setup`` set or changed on the data hosts.

    Args:
        datamodule: The user's DataModule. Its data need not be accessible from this machine.
        addresses: Addresses of the data hosts, ``host:port``.
        settings: Window, timeouts, credentials.
        seed: Base of shuffling and of all random states. Default: that of ``seed_everything``, else 0.
        job: Name of the job; the data hosts must use the same.

    Raises:
        DataSettingsError: There is no address, or the library for ``settings.compression`` is not installed.
    """

    # False in a job: a script may run the Trainer several times before training has finished.
    closes_on_teardown = True

    def __new__(cls, datamodule: LightningDataModule, *_: Any, **__: Any) -> RemoteDataModule:
        """Create an instance whose class has exactly the hooks that the user's DataModule overrides."""
        own = type(datamodule)
        hooks = {
            name: _loader_hook(name)
            for name in _LOADER_HOOKS
            if getattr(own, name, None) is not getattr(LightningDataModule, name)
        }
        # Checkpoints store the state of a DataModule under its class name, which must not depend on data hosts. The
        # private module hides the class from jsonargparse, which searches DataModules by name.
        names = {"__qualname__": own.__qualname__, "__module__": f"{__name__}._wrapped", "__doc__": own.__doc__}
        return super().__new__(type(own.__name__, (cls,), {**hooks, **names}))

    def __init__(
        self,
        datamodule: LightningDataModule,
        addresses: Sequence[str],
        *,
        settings: DataServiceSettings | None = None,
        seed: int | None = None,
        job: str = LOCAL_JOB,
    ) -> None:
        if not addresses:
            raise DataSettingsError("RemoteDataModule needs the address of at least one data host: addresses=[...].")
        settings = settings or DataServiceSettings()
        if settings.compression is not None:
            codec_of(settings.compression)  # report a missing library here instead of with the first batch
        # Lightning's own __init__ only sets attributes, and the wrapped DataModule has those already.
        self._datamodule = datamodule
        self._hosts = DataHosts(datamodule, addresses, settings, seed, job)
        # What setup() has set on the data hosts, and is not copied.
        self._missing: frozenset[str] = frozenset()
        self._take_hooks()

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
            raise self._no_attribute(name) from error
        if value is None and name in self._missing:  # a default of the class
            raise self._no_attribute(name)
        return value

    def _no_attribute(self, name: str) -> AttributeError:
        return AttributeError(
            f"{type(self._datamodule).__name__} has no attribute {name!r} on a trainer. prepare_data() and setup() run "
            f"on the data hosts only. What setup() sets there is copied to the trainers if it is plain ({_COPIED})."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped DataModule, whose hooks and ``state_dict`` read it, unless it is our own."""
        if name.startswith("_") or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._datamodule, name, value)

    def __reduce__(self) -> Any:
        """Pickle what does not belong to this process; unpickling creates the class again."""
        state = {"_datamodule": self._datamodule, "closes_on_teardown": self.closes_on_teardown}
        hosts = self._hosts
        arguments = {"settings": hosts.settings, "seed": hosts.seed, "job": hosts.job}
        # The DataModule is in the state, not an argument: it refers to the Trainer, and the Trainer to this object.
        return _rebuild, (type(self._datamodule), hosts.addresses, arguments), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the wrapped DataModule, which refers back to this object.

        Args:
            state: The state that ``__reduce__`` returned.
        """
        self.__dict__.update(state)
        self._hosts.datamodule = self._datamodule
        self._take_hooks()

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
        return self._datamodule.hparams

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters of the wrapped DataModule, as ``save_hyperparameters`` recorded them."""
        return self._datamodule.hparams_initial

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
                    "BatchSizeFinder sets the batch size on the trainer, but the data hosts build the batches, with "
                    f"the batch size of their own {type(self._datamodule).__name__}. Find it in a run without data "
                    "hosts, and pass it as an argument."
                )
            if self._hosts.progress not in trainer.callbacks:
                trainer.callbacks[:0] = [self._hosts.progress, self._hosts.reporter]
        left = self._hosts.set_up(stage)
        self._take_attributes(left.attributes)
        self._leave_out(left.missing)

    def _leave_out(self, names: Sequence[str]) -> None:
        """Note what ``setup`` has set on the data hosts and is not copied: it must not look as if it had not run."""
        for name in names:
            if vars(self._datamodule).get(name, self) is None:
                delattr(self._datamodule, name)
        self._missing = frozenset(names)
        stale = [name for name in names if inspect.getattr_static(self._datamodule, name, None) is not None]
        if stale and (self.trainer is None or self.trainer.is_global_zero):
            logger.warning(
                "setup() has replaced %s of %s on the data hosts by values that are not copied to the trainers (%s). "
                "Here they keep the values that they had before.",
                ", ".join(stale),
                type(self._datamodule).__name__,
                _COPIED,
            )

    def _take_attributes(self, attributes: dict[str, Any]) -> None:
        """Set the plain values that the user's ``setup`` has set on the data hosts."""
        for name, encoded in attributes.items():
            value = plain_value(encoded)
            own = inspect.getattr_static(type(self._datamodule), name, None)
            if not isinstance(own, _PLAIN):
                raise WireError(
                    f"A data host says that setup() set {name}={reprlib.repr(value)}, but in the class "
                    f"{type(self._datamodule).__name__} on this trainer {name} is a {type(own).__name__}. Only names "
                    "that the class does not have, or has as plain values, are copied to trainers. "
                    "If your setup() does set it, give the value another name."
                )
            setattr(self._datamodule, name, value)

    def teardown(self, stage: str) -> None:
        """Disconnect from the data hosts, which run the user's ``teardown`` when no trainer needs them.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        self._hosts.end_run()
        if self.closes_on_teardown:
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
        self._hosts.close(outcome, is_success=is_success)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped DataModule."""
        return self._datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped DataModule.

        Args:
            state_dict: A state that ``state_dict`` returned.
        """
        self._datamodule.load_state_dict(state_dict)
        # Its loaders may depend on it: the stage of a curriculum, for example.
        try:
            self._hosts.state = json.dumps(state_dict)
        except (TypeError, ValueError) as error:
            _warn_once(
                "The state of %s cannot be sent to data hosts (%s). Their loaders do not see it. Keep only numbers, "
                "strings, lists and dicts in it.",
                type(self._datamodule).__name__,
                error,
            )


def _loader_hook(name: str) -> Callable[[RemoteDataModule], Any]:
    def hook(self: RemoteDataModule) -> Any:
        return self._hosts.loaders(name.removesuffix("_dataloader"))

    hook.__name__ = name
    hook.__doc__ = f"Return loaders for the batches of the user's ``{name}`` on the data hosts."
    return hook


def _rebuild(own: type, addresses: list[str], arguments: dict[str, Any]) -> RemoteDataModule:
    return RemoteDataModule(object.__new__(own), addresses, **arguments)
