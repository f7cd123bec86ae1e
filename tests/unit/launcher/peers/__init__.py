"""Tests of the launchers' agreement on how a job ends: real sockets, short times."""
