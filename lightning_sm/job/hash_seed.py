"""The seed of Python's string hashes, which determine the order of sets."""

from __future__ import annotations

from collections.abc import Mapping

_NAME = "PYTHONHASHSEED"


def hash_seed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives all processes of a job the same hashes; a value in ``env`` takes precedence.

    By default, Python seeds its hashes differently in each process, so label ids from ``enumerate(set(names))`` would
    differ between data hosts.
    """
    return {_NAME: env.get(_NAME) or "0"}
