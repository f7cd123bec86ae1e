"""Readers of run records, during or after the run: the report, the live view, comparisons, plans and timelines."""
