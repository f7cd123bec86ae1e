"""Custom checks of ``make lint``."""
