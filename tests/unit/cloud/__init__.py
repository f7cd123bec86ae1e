"""Unit tests of ``lightning_sm.cloud``."""
