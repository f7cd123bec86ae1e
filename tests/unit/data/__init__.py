"""Unit tests of the data service: no sockets, no processes."""
