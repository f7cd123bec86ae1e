"""Lightning base classes that hide this package's internal classes from command lines.

jsonargparse lists a class's ``__subclasses__`` in ``--help``, and searches them for short names. Internal classes would
appear among the choices of every script, and could make a user's class, such as ``Progress``, ambiguous. These bases
report no subclasses, and have private paths, which jsonargparse does not list.
"""

from __future__ import annotations

from typing import Any

from lightning_sm._lightning import Callback, LightningDataModule, ProgressBar, WrappingCheckpointIO


@classmethod  # type: ignore[misc]
def _none(_cls: type[Any]) -> list[Any]:
    """Return no subclasses, so that a search for classes stops here."""
    return []


class UnlistedCallback(Callback):
    """A ``Callback`` that jsonargparse does not list."""

    __subclasses__ = _none


class UnlistedProgressBar(ProgressBar):
    """A ``ProgressBar`` that jsonargparse does not list."""

    __subclasses__ = _none


class UnlistedCheckpointIO(WrappingCheckpointIO):
    """A ``CheckpointIO`` that wraps another one and that jsonargparse does not list."""

    __subclasses__ = _none


class UnlistedDataModule(LightningDataModule):
    """A ``LightningDataModule`` that jsonargparse does not list."""

    __subclasses__ = _none
