"""Unit tests of ``lightning_sm.submit.sdk``."""
