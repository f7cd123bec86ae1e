"""Unit tests of ``lightning_sm.training.callbacks``."""
