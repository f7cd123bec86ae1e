"""Classes of a script that travel by value: a process that has a class keeps it as it is.

cloudpickle tracks the classes that it pickles by value, so that a trainer gets its own class back. But it also sets the
attributes of the class to those of the copy that comes back: what the script had changed in the meantime would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle

# Classes that this process has created, but whose attributes are not set yet.
_unfinished: set[type] = set()


def without_changes(reduced: Any) -> Any:
    """Return the reduced value of a class by value, with which a process that has the class does not change it.

    Args:
        reduced: What cloudpickle's ``reducer_override`` returns for any object.
    """
    if not isinstance(reduced, tuple) or reduced[-1] is not cloudpickle._class_setstate:
        return reduced
    make, arguments, state, *_ = reduced
    return _class_of, (make, arguments), state, None, None, _finish


def _class_of(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    number = arguments[-2]
    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    if known is not None:
        return known
    new = make(*arguments)
    _unfinished.add(new)
    return new


def _finish(new: type, state: Any) -> None:
    if new in _unfinished:
        _unfinished.remove(new)
        cloudpickle._class_setstate(new, state)


def with_slots(reduced: Any) -> Any:
    """Let a class by value get its ``__slots__`` when it is created; cloudpickle sets them later, without an effect.

    Args:
        reduced: What cloudpickle's ``reducer_override`` returns for any object.
    """
    if isinstance(reduced, tuple) and reduced[0] is cloudpickle._make_skeleton_class:
        (_, _, _, keywords, *_), (attributes, *_) = reduced[1:3]
        if attributes.get("__slots__"):  # NamedTuple has empty ones, and refuses to be given any
            keywords["__slots__"] = attributes.pop("__slots__")
    return reduced
