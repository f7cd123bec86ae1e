"""Tests of single modules: no sockets, no processes, no waiting."""
