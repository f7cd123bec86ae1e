"""Tests of how launchers agree on the outcome of a job: real sockets, short timeouts."""
