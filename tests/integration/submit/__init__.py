"""Integration tests of ``lightning_sm.submit``."""
