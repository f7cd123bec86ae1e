"""Classes of ours that stand in for a user's class: Lightning, checkpoints and messages see the user's name."""

from __future__ import annotations

from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def named_as(own: _Class, *bases: type, **members: Any) -> _Class:
    """Return a class with the name of a user's.

    Args:
        own: The user's class.
        *bases: Its bases.
        **members: Its members.
    """
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, bases, {**names, **members})  # type: ignore[return-value]  # it has the bases' type
