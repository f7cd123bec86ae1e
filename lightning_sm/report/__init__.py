"""Readers of run records, during or after the run: report, comparison, plan and verification."""
