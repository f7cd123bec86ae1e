"""Unit tests of ``lightning_sm.launcher.toolkit``."""
