"""Warnings about Lightning's own code, which each job would print, and which nobody who reads the log can act on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

_LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
_PYTREE = r"(pytorch_lightning|lightning\.pytorch)\.utilities\._pytree$"


def hide_known_warnings() -> Callable[[], None]:
    """Hide what torch says of the ``LeafSpec`` that Lightning makes for each set of loaders, and nothing else.

    Returns:
        A function that shows it again.

    Source:
        Lightning 2.6.6, ``utilities/_pytree.py``, with torch 2.14.
    """
    warnings.filterwarnings("ignore", _LEAF_SPEC, FutureWarning, _PYTREE)
    added = warnings.filters[0]

    def show_again() -> None:
        if added in warnings.filters:  # warnings.catch_warnings() puts another list there
            warnings.filters.remove(added)  # type: ignore[attr-defined]  # typeshed has a Sequence

    return show_again
