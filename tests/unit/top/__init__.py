"""Unit tests of ``lightning_sm.top``."""
