"""Warnings about Lightning's own code, which every job would print, and about which its user can do nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable

_LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
_PYTREE = r"(pytorch_lightning|lightning\.pytorch)\.utilities\._pytree$"


def hide_known_warnings() -> Callable[[], None]:
    """Hide torch's warning about the ``LeafSpec`` that Lightning makes for each set of loaders, and no other.

    Returns:
        A function that shows the warning again.

    Source:
        Lightning 2.6.6, ``utilities/_pytree.py``, with torch 2.14.
    """
    warnings.filterwarnings("ignore", _LEAF_SPEC, FutureWarning, _PYTREE)
    added = warnings.filters[0]

    def show_again() -> None:
        if added in warnings.filters:  # warnings.catch_warnings() replaces the list
            warnings.filters.remove(added)  # type: ignore[attr-defined]  # typeshed has a Sequence

    return show_again
