"""Integration tests of ``lightning_sm.launcher``."""
