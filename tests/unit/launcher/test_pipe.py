"""When reading a pipe ends although a process holds it open."""

from __future__ import annotations

import io
import os
import threading

import pytest

from lightning_sm.launcher.pipe import DrainedPipe


@pytest.fixture
def ends():
    """A pipe that can be read to its end while its write end stays open."""
    readable, writable = os.pipe()
    with DrainedPipe(os.fdopen(readable, "rb")) as pipe, os.fdopen(writable, "wb", buffering=0) as writer:
        yield pipe, writer


def test_what_it_holds_is_read_to_the_last_byte(ends):
    """Everything in the pipe is read, in pieces of any size, although its write end stays open."""
    pipe, writer = ends
    data = os.urandom(60_000)
    writer.write(data)
    pipe.end_when_empty()
    assert pipe.read(7) + b"".join(iter(lambda: pipe.read(4096), b"")) == data


def test_a_reader_that_waits_for_more_is_told(ends):
    """Ending an empty pipe wakes the thread that is reading it."""
    pipe, writer = ends
    writer.write(b"one\ntw")
    read = []
    reader = threading.Thread(target=lambda: read.extend(io.BufferedReader(pipe)), daemon=True)
    reader.start()
    pipe.end_when_empty()
    reader.join(60)
    assert read == [b"one\n", b"tw"]


def test_it_ends_with_its_last_writer(ends):
    """The pipe ends when its last writer closes it."""
    pipe, writer = ends
    writer.close()
    assert pipe.read(1) == b""
