"""A folder for ``PYTHONPATH`` with which processes take a third of the time; see ``sitecustomize``."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def python_path(*others: Path | str) -> str:
    """A ``PYTHONPATH`` of this folder, and of others.

    Args:
        others: The other folders, in their order.
    """
    return os.pathsep.join(map(str, (FOLDER, *others)))
