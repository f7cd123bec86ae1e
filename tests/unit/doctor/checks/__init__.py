"""Unit tests of ``lightning_sm.doctor.checks``."""
