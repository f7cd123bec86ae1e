"""Classes that stand in for a user's class under its name, which Lightning, checkpoints and messages show."""

from __future__ import annotations

from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def named_as(own: _Class, *bases: type, **members: Any) -> _Class:
    """Return a new class with the name of a user's class.

    Args:
        own: The user's class.
        *bases: Bases of the new class.
        **members: Members of the new class.
    """
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, bases, {**names, **members})  # type: ignore[return-value]  # it has the bases' type
