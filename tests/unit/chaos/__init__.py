"""Unit tests of ``lightning_sm.chaos``."""
