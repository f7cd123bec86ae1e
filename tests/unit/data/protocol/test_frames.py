"""Frames come out of a message as they went in, and nothing is read beyond its end."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.protocol.frames import (
    FRAME_BYTES,
    EncodedBatch,
    FrameKind,
    StepRangeHeader,
    frame,
    frames,
    pack_batches,
    parse_failure,
    unpack_batches,
)
from lightning_sm.errors import WireError

FRAMES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), st.binary(max_size=100))
)


def message_of(parts):
    """Join frames as they are sent."""
    return b"".join([part for i, k, v, data in parts for part in (frame(i, k, len(data), v), data)])


@given(FRAMES)
def test_frames_survive_the_wire(sent):
    """Any number of frames in one message comes apart again."""
    taken = [(number, kind, value, bytes(data)) for number, kind, value, data in frames(message_of(sent))]
    assert taken == sent


@given(FRAMES, st.data())
def test_a_message_that_is_cut_is_refused(sent, data):
    """Cut anywhere but between two frames, a message is an error; until there its frames are good."""
    message = message_of(sent)
    position = data.draw(st.integers(0, len(message)))
    ends, end = {0}, 0
    for *_, payload in sent:
        end += FRAME_BYTES + len(payload)
        ends.add(end)
    if position in ends:
        list(frames(message[:position]))
    else:
        with pytest.raises(WireError):
            list(frames(message[:position]))


def test_a_header_survives_the_wire():
    """Size, times, batches and the number of the worker come out as they went in."""
    header = StepRangeHeader(24, 0.25, 0.5, pack_batches([EncodedBatch(0, 24, b"structure")]), worker=3)
    assert StepRangeHeader.decode(memoryview(header.encode())) == header


def test_a_failure_is_a_traceback_at_most():
    """A million characters in the longest way that JSON can write them fit; more is refused unread."""
    failure = b'{"error": "E", "where": "w", "text": "%s"}'
    assert len(parse_failure(memoryview(failure % (b"\\u1234" * (1 << 20)))).text) == 1 << 20
    with pytest.raises(WireError, match=r"failure that a data host reported has \d+ bytes .*; 8388608 bytes"):
        parse_failure(memoryview(failure % (b" " * (8 << 20))))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.binary(max_size=50)), min_size=1))
def test_the_batches_of_a_range_survive_the_wire(parts):
    """Places and structures come out as they went in."""
    batches = [EncodedBatch(*part) for part in parts]
    assert unpack_batches(pack_batches(batches), 200) == batches


@pytest.mark.parametrize(
    ("num_batches", "num_bytes", "cut"),
    [(1, 30, None), (3, 30, None), (9, 30, None), (2, 29, None), (2, 30, -1)],
    ids=["fewer", "more", "many more", "too few bytes", "cut"],
)
def test_batches_that_do_not_fit_together_are_refused(num_batches, num_bytes, cut):
    """Another number of batches than there are, or a place outside of what arrived, is an error of the wire."""
    packed = pack_batches([EncodedBatch(0, 10, b"one"), EncodedBatch(10, 20, b"two")])
    assert len(unpack_batches(packed, 30)) == 2
    with pytest.raises(WireError):
        unpack_batches(struct.pack("<I", num_batches) + packed[4:cut], num_bytes)
