"""Unit tests of ``lightning_sm.emulator``."""
