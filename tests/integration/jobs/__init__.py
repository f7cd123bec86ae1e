"""Integration tests of ``lightning_sm.jobs``."""
