"""The versions of installed packages."""

import importlib.metadata


def installed_version(distribution: str) -> str | None:
    """Return an installed package's version, or None, from its metadata: importing torch would take seconds."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
