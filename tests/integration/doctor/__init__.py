"""Integration tests of ``lightning_sm.doctor``."""
