"""Unit tests of ``lightning_sm.data.protocol``."""
