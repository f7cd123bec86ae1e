"""Unit tests of the pipeline strategy."""
