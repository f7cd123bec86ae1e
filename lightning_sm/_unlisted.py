"""Bases of Lightning for classes that this package makes for itself, and which no command line offers.

jsonargparse lists a class's ``__subclasses__`` in ``--help``, and searches them for a short name. Ours would be among
the choices of each script, and a user's own ``Progress`` would be ambiguous. These bases report no subclasses, and have
private paths, which jsonargparse does not list.
"""

from __future__ import annotations

from typing import Any

from lightning_sm._lightning import (
    Callback,
    LightningDataModule,
    ProgressBar,
    WrappingCheckpointIO,
)


@classmethod  # type: ignore[misc]
def _none(_cls: type[Any]) -> list[Any]:
    """Return nothing, so that whoever lists classes ends here."""
    return []


class UnlistedCallback(Callback):
    """A ``Callback``."""

    __subclasses__ = _none


class UnlistedProgressBar(ProgressBar):
    """A ``ProgressBar``."""

    __subclasses__ = _none


class UnlistedCheckpointIO(WrappingCheckpointIO):
    """A ``CheckpointIO`` around another one."""

    __subclasses__ = _none


class UnlistedDataModule(LightningDataModule):
    """A ``LightningDataModule``."""

    __subclasses__ = _none
