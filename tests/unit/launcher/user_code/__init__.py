"""Unit tests of ``lightning_sm.launcher.user_code``."""
