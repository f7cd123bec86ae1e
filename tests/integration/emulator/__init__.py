"""Integration tests of ``lightning_sm.emulator``."""
