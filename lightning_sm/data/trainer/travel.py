"""What rank 0 sends of its DataModule: a snapshot, the plain values beside it, and what was set since ``setup``."""

from __future__ import annotations

import inspect
import logging
import reprlib
import weakref
from typing import Any, ClassVar

from lightning_sm._lightning import LightningDataModule
from lightning_sm.data.host.pickler import PickledObject, is_value, pickle_object
from lightning_sm.data.protocol.calls import SetUp
from lightning_sm.data.protocol.plain_values import plain_json, plain_value
from lightning_sm.errors import WireError

logger = logging.getLogger(__name__)

# What a data host may replace on the class of the DataModule: defaults such as ``num_classes = None``, never a hook.
_PLAIN = (type(None), bool, int, float, str, list, tuple, set, dict)
COPIED = "numbers, strings, and lists, tuples, sets and dicts of these, up to 64 KB"

_ABSENT = object()


class TravellingModule:
    """The user's DataModule on rank 0, as the data hosts get it, and what they return of it.

    Plain values travel beside the pickled rest: data hosts set those that have changed. If anything else has changed,
    they start again with the new DataModule. Values that ``setup`` has set there, and that were copied to this process,
    do not travel back: they are replaced by what was there before.

    Args:
        datamodule: The user's DataModule.

    Attributes:
        earlier: The stages for which ``setup`` has run in earlier runs of the Trainer, in order.
        missing: Names of attributes that ``setup`` has set on the data hosts, and that are not copied.
        state: The state that was loaded in this run; None: none was.
    """

    # By id of the DataModule: a script may give it to several Trainers.
    _known: ClassVar[dict[int, TravellingModule]] = {}

    def __init__(self, datamodule: LightningDataModule) -> None:
        self._datamodule = weakref.ref(datamodule)
        self.earlier: list[str] = []
        self.missing: frozenset[str] = frozenset()
        self.state: dict[str, Any] | None = None
        self._stage: str | None = None
        self._is_set_up = False
        # By attribute that setup() has set: its value before, and the one that was copied.
        self._copied: dict[str, tuple[Any, Any]] = {}

    @classmethod
    def of(cls, datamodule: LightningDataModule) -> TravellingModule:
        """Return the one of a DataModule."""
        known = cls._known.get(id(datamodule))
        if known is None or known._datamodule() is not datamodule:
            known = cls._known[id(datamodule)] = cls(datamodule)
            weakref.finalize(datamodule, cls._known.pop, id(datamodule), None).atexit = False
        return known

    @property
    def datamodule(self) -> LightningDataModule:
        """The user's DataModule, which its ``RemoteDataModule`` keeps alive.

        Raises:
            ReferenceError: It is gone.
        """
        datamodule = self._datamodule()
        if datamodule is None:
            raise ReferenceError("the DataModule no longer exists")
        return datamodule

    def begin_run(self, stage: str) -> None:
        """Begin a run of the Trainer.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        if self._stage is not None and self._stage not in self.earlier:
            self.earlier.append(self._stage)
        self._stage = stage
        self._is_set_up = False
        self.state = None

    def values(self) -> dict[str, str]:
        """Return the plain values of the DataModule, encoded by ``plain_json``, by attribute."""
        if not _pickles_by_default(type(self.datamodule)):
            return {}
        return {name: plain_json(value) or "null" for name, value in self._state().items() if is_value(value)}

    def plain(self) -> dict[str, str]:
        """Return the attributes that are numbers, strings or containers of these, as JSON, by name."""
        texts = {name: plain_json(value) for name, value in self._state().items()}
        return {name: text for name, text in texts.items() if text is not None}

    def kept(self) -> list[str]:
        """Return the attributes that were set here since ``setup`` has set them in this run."""
        if not self._is_set_up:
            return []
        own = vars(self.datamodule)
        return [name for name, (_, after) in self._copied.items() if not _is_same(own.get(name, _ABSENT), after)]

    def pickled(self, *, by_name: bool) -> PickledObject:
        """Return the DataModule without its plain values, pickled.

        Args:
            by_name: Whether the data hosts have run this script.

        Raises:
            DataSettingsError: An attribute cannot be pickled.
        """
        return pickle_object(self.datamodule, self._state_to_pickle, by_name=by_name)

    def take(self, left: SetUp) -> None:
        """Set the plain values that the user's ``setup`` has set on the data hosts, and note the names of all others.

        Raises:
            WireError: A data host has set what is no plain value on the class of the DataModule.
        """
        for name, text in left.attributes.items():
            self._copy(name, self._checked(name, plain_value(text)))
        for name in left.missing:
            # It must not look as if setup() had not run.
            if vars(self.datamodule).get(name, self) is None:
                self._copy(name, _ABSENT)
        self.missing = frozenset(left.missing)
        self._is_set_up = True
        stale = [name for name in left.missing if inspect.getattr_static(self.datamodule, name, None) is not None]
        trainer = self.datamodule.trainer
        if stale and (trainer is None or trainer.is_global_zero):
            logger.warning(
                "setup() has replaced %s of %s on the data hosts by values that are not copied to the trainers (%s). "
                "Here they keep the values that they had before.",
                ", ".join(stale),
                type(self.datamodule).__name__,
                COPIED,
            )

    def _copy(self, name: str, value: Any) -> None:
        own = vars(self.datamodule)
        before = now = own.get(name, _ABSENT)
        if name in self._copied and _is_same(now, self._copied[name][1]):
            before = self._copied[name][0]
        self._copied[name] = before, value
        if value is _ABSENT:
            own.pop(name, None)
        else:
            setattr(self.datamodule, name, value)

    def _checked(self, name: str, value: Any) -> Any:
        own = inspect.getattr_static(type(self.datamodule), name, None)
        if isinstance(own, _PLAIN):
            return value
        raise WireError(
            f"A data host says that setup() set {name}={reprlib.repr(value)}, but in the class "
            f"{type(self.datamodule).__name__} on this trainer {name} is a {type(own).__name__}. Only names "
            "that the class does not have, or has as plain values, are copied to trainers. "
            "If your setup() does set it, give the value another name."
        )

    def _state(self) -> dict[str, Any]:
        """Return the attributes as the user has set them: without what setup() has set on the data hosts."""
        state = dict(vars(self.datamodule))
        state.pop("trainer", None)
        for name, (before, after) in self._copied.items():
            if not _is_same(state.get(name, _ABSENT), after):
                continue
            if before is _ABSENT:
                state.pop(name, None)
            else:
                state[name] = before
        return state

    def _state_to_pickle(self, part: Any) -> dict[str, Any] | None:
        if part is not self.datamodule or not _pickles_by_default(type(part)):
            return None
        return {name: value for name, value in self._state().items() if not is_value(value)}


def _is_same(value: Any, copied: Any) -> bool:
    """Return whether an attribute has the value that was copied: plain values have the same text then."""
    if value is _ABSENT or copied is _ABSENT:
        return value is copied
    return type(value) is type(copied) and plain_json(value) == plain_json(copied)


def _pickles_by_default(own: type) -> bool:
    """Return whether a class leaves to Python how its objects are pickled: attribute by attribute."""
    return all(
        getattr(own, name, None) is getattr(object, name, None)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    )
