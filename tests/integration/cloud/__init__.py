"""Integration tests of ``lightning_sm.cloud``."""
