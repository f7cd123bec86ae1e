"""Integration tests of ``lightning_sm.top``."""
