"""Readers of the record of a run, while it runs or when it has ended: report, comparison, plan and verification."""
