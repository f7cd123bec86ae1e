"""Checks of ``make lint`` that no linter has."""
