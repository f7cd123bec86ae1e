"""Unit tests of ``lightning_sm.jobs``."""
