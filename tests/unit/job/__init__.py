"""Unit tests of ``lightning_sm.job``."""
