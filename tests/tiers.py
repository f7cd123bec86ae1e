"""The two tiers of tests: ``make test`` runs one representative of each property, ``make proof`` the others as well.

What only widens a property (further rows of a matrix, another SDK, another example) has the marker ``proof``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def matrix(*factors: Sequence[Any]) -> list[Any]:
    """Combine all values of some factors, for ``pytest.mark.parametrize``.

    ``make test`` runs as many combinations as show every value at least once, ``make proof`` the others.

    Args:
        factors: Hashable values of each argument.
    """
    shown = {tuple(factor[row % len(factor)] for factor in factors) for row in range(max(map(len, factors)))}
    return [row if row in shown else pytest.param(*row, marks=pytest.mark.proof) for row in product(*factors)]


def sample(rows: Sequence[Any], *representatives: Any) -> list[Any]:
    """Return all values of one argument, of which ``make test`` runs the representatives only.

    Args:
        rows: The values.
        representatives: Some of them. Default: the first.
    """
    chosen = representatives or rows[:1]
    return [row if row in chosen else pytest.param(row, marks=pytest.mark.proof) for row in rows]
