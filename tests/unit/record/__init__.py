"""Unit tests of ``lightning_sm.record``."""
