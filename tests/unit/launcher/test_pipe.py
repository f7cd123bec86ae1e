"""Where a pipe ends that somebody keeps open."""

from __future__ import annotations

import io
import os
import threading

import pytest

from lightning_sm.launcher.pipe import DrainedPipe


@pytest.fixture
def ends():
    """A pipe that is read as one whose writers have exited, though its write end stays open."""
    readable, writable = os.pipe()
    with DrainedPipe(os.fdopen(readable, "rb")) as pipe, os.fdopen(writable, "wb", buffering=0) as writer:
        yield pipe, writer


def test_what_it_holds_is_read_to_the_last_byte(ends):
    """Once it is to end, in pieces of any size, though somebody keeps it open."""
    pipe, writer = ends
    data = os.urandom(60_000)
    writer.write(data)
    pipe.end_when_empty()
    assert pipe.read(7) + b"".join(iter(lambda: pipe.read(4096), b"")) == data


def test_a_reader_that_waits_for_more_is_told(ends):
    """An empty pipe that is to end wakes the thread that reads it."""
    pipe, writer = ends
    writer.write(b"one\ntw")
    read = []
    reader = threading.Thread(target=lambda: read.extend(io.BufferedReader(pipe)), daemon=True)
    reader.start()
    pipe.end_when_empty()
    reader.join(60)
    assert read == [b"one\n", b"tw"]


def test_it_ends_with_its_last_writer(ends):
    """Nobody needs to say so."""
    pipe, writer = ends
    writer.close()
    assert pipe.read(1) == b""
