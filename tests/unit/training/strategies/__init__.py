"""Unit tests of ``lightning_sm.training.strategies``."""
