"""Classes of a trainer's script that data hosts got by value, and send back by reference.

cloudpickle tracks classes that it pickles by value, so that a trainer gets its own class back. But it also sets the
attributes of the class to those of the copy that comes back: what the script had changed in the meantime would be lost.
"""

from __future__ import annotations

import pickle
from typing import Any

from cloudpickle import cloudpickle

# Ids of the classes in objects that trainers have sent to this process, or to the one it was forked from.
_from_trainers: set[str] = set()


def load_classes_of_trainers(data: memoryview, buffers: list[memoryview]) -> Any:
    """Unpickle an object that a trainer has sent, and remember its script's classes.

    Args:
        data: The pickle, only from a trainer that knows the token.
        buffers: The memory of its arrays and tensors.
    """
    before = set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID)
    loaded = pickle.loads(data, buffers=buffers)  # noqa: S301  # see above
    _from_trainers.update(set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID) - before)
    return loaded


def reduce_class(obj: Any) -> Any:
    """Return the reduced value of a class that came from a trainer; None for anything else."""
    if not isinstance(obj, type):
        return None
    number = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
    return (_class_of, (number,)) if number in _from_trainers else None


def _class_of(number: str) -> type:
    """Return the script's class; called in the trainer."""
    found: type = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[number]
    return found


def with_slots(reduced: Any) -> Any:
    """Let a class that is pickled by value get its ``__slots__`` when it is created, as cloudpickle's copy has none."""
    if isinstance(reduced, tuple) and reduced[0] is cloudpickle._make_skeleton_class:
        (_, _, _, keywords, *_), (attributes, *_) = reduced[1:3]
        if attributes.get("__slots__"):  # NamedTuple has empty ones, and refuses to be given any
            keywords["__slots__"] = attributes.pop("__slots__")
    return reduced
