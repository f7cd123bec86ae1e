"""Unit tests of ``lightning_sm.timing``."""
