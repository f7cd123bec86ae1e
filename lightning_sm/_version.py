"""The version of lightning_sm, and those of the packages beside it."""

import importlib.metadata

__version__ = "0.1.0"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None, from its metadata: importing torch would take seconds."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
