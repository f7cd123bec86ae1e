"""Integration tests of ``lightning_sm.timing``."""
