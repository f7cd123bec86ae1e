"""Unit tests of ``lightning_sm.report``."""
