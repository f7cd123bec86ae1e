"""Integration tests of ``lightning_sm.chaos``."""
