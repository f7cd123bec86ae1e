"""Random scripts, run by stock Lightning and with a data host: ``python -m tests.differential --cases 1000``."""
