"""The two tiers of tests: ``make test`` runs one representative of each property, and ``make proof`` runs all tests.

Tests that only widen a property have the marker ``proof``; tests with the SDKs and with other sets of Lightning
distributions get it automatically. Of a parametrized test with the marker ``matrix``, ``make test`` runs just enough
rows to cover each value of each parameter. With ``matrix(first=n)`` it runs the first ``n`` rows, and with
``matrix(rows=[...])`` the rows whose id contains one of these texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

_VARIANTS = ("sdk2", "sdk3", "lightning_variants")


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Add the marker ``proof`` to variants, and to rows of matrices that cover nothing new.

    Args:
        items: All collected tests. A test that was selected by name keeps its tier.
    """
    matrices = defaultdict(list)
    for item in items:
        if any(item.get_closest_marker(name) for name in _VARIANTS):
            item.add_marker(pytest.mark.proof)
        if item.get_closest_marker("matrix") is not None:
            matrices[item.nodeid.partition("[")[0]].append(item)
    for rows in matrices.values():
        chosen = rows[0].get_closest_marker("matrix").kwargs
        if "first" in chosen:
            shown = rows[: chosen["first"]]
        elif "rows" in chosen:
            shown = [row for row in rows if any(text in row.callspec.id for text in chosen["rows"])]
        else:
            shown = _covering(rows)
        if not shown and len(rows) > 1:
            raise pytest.UsageError(f"{rows[0].nodeid}: the marker matrix names no row of this test: {chosen}")
        for row in rows:
            if row not in shown:
                row.add_marker(pytest.mark.proof)


def _covering(rows: list[pytest.Item]) -> list[pytest.Item]:
    """Return some rows that cover every value of every parameter."""
    shown: list[pytest.Item] = []
    seen: set[tuple[str, str]] = set()
    for enough in (all, any):  # first choose rows that are new in every parameter, then rows that are new in any
        for row in rows:
            values = {(name, repr(value)) for name, value in row.callspec.params.items()}
            if enough(value not in seen for value in values):
                shown.append(row)
                seen |= values
    return shown
