"""Frames are read from a message as they were written, and never beyond its end."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.protocol.frames import (
    FRAME_BYTES,
    EncodedBatch,
    FrameKind,
    FrameReader,
    StepRangeHeader,
    frame,
    frames,
    parse_failure,
)
from lightning_sm.errors import WireError

FRAMES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), st.binary(max_size=100))
)


def message_of(parts):
    """Join frames into a message."""
    return b"".join([part for i, k, v, data in parts for part in (frame(i, k, len(data), v), data)])


@given(FRAMES)
def test_frames_survive_the_wire(sent):
    """Any number of frames in one message can be separated again."""
    taken = [(number, kind, value, bytes(data)) for number, kind, value, data in frames(message_of(sent))]
    assert taken == sent


@given(FRAMES, st.data())
def test_a_message_that_is_cut_is_refused(sent, data):
    """A message cut within a frame is refused; cut between two frames, it is valid."""
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


class Owner:
    """Receives frames, and provides memory for the payloads of DATA frames, unless they are unwanted."""

    def __init__(self, unwanted=()):
        self.taken, self.ends = [], []
        self.unwanted = set(unwanted)
        self.memory = None

    def take(self, request_id, kind, value, payload):
        self.taken.append((request_id, kind, value, bytes(payload)))

    def place(self, request_id, kind, value, num_bytes):
        if request_id in self.unwanted:
            return None
        self.memory = memoryview(bytearray(num_bytes))
        self._fields = request_id, kind, value
        return self

    def end(self, is_complete):
        self.ends.append(is_complete)
        if is_complete:
            self.taken.append((*self._fields, bytes(self.memory)))


def feed(reader, content, sizes=()):
    """Feed bytes to a reader, in parts of at most these sizes, and then as they fit."""
    sizes, position = iter(sizes), 0
    while position < len(content):
        place = reader.memory()[: next(sizes, None)][: len(content) - position]
        place[:] = content[position : position + len(place)]
        reader.advance(len(place))
        position += len(place)


def feed_message(reader, content, sizes=()):
    """Feed a whole message to a reader."""
    reader.begin(len(content))
    feed(reader, content, sizes)


@given(st.lists(FRAMES, max_size=3), st.lists(st.integers(1, 40)), st.sets(st.integers(0, 2**32 - 1)))
def test_frames_that_arrive_in_parts_are_those_of_the_message(messages, sizes, unwanted):
    """Frames do not depend on where the parts end; unwanted payloads are skipped."""
    owner = Owner(unwanted)
    reader = FrameReader(owner.take, owner.place)
    for sent in messages:
        feed_message(reader, message_of(sent), sizes)
    expected = [one for sent in messages for one in sent if one[1] != FrameKind.DATA or one[0] not in unwanted]
    assert owner.taken == expected
    assert all(owner.ends)


@given(FRAMES, st.data())
def test_a_message_that_ends_within_a_frame_is_refused_as_it_arrives(sent, data):
    """A message that ends within a frame is refused at the latest when the head of that frame has arrived."""
    message = message_of(sent)
    size = data.draw(st.integers(0, len(message)))
    is_whole = True
    try:
        list(frames(message[:size]))
    except WireError:
        is_whole = False
    reader = FrameReader(Owner().take, Owner().place)
    with contextlib.nullcontext() if is_whole else pytest.raises(WireError):
        feed_message(reader, message[:size])


def test_memory_that_is_no_longer_wanted_is_left_at_once():
    """If a request is cancelled while its piece arrives, its memory is left alone, and the next frame is intact."""
    owner = Owner()
    reader = FrameReader(owner.take, owner.place)
    content = message_of([(1, FrameKind.DATA, 0, b"x" * 1000), (2, FrameKind.DATA, 0, b"next")])
    reader.begin(len(content))
    feed(reader, content[:100])
    before, owner.memory = owner.memory, None
    feed(reader, content[100:])
    assert bytes(before) == b"x" * (100 - FRAME_BYTES) + bytes(900 + FRAME_BYTES)
    assert owner.ends == [False, True]
    assert owner.taken == [(2, FrameKind.DATA, 0, b"next")]


def test_memory_of_a_connection_that_is_lost_is_given_back_once():
    """If a connection is lost within a piece, the piece's memory is returned once."""
    owner = Owner()
    reader = FrameReader(owner.take, owner.place)
    reader.begin(FRAME_BYTES + 1000)
    feed(reader, message_of([(1, FrameKind.DATA, 0, b"x" * 1000)])[:100])
    reader.close()
    reader.close()
    assert owner.ends == [False]


def test_a_header_survives_the_wire():
    """The size, times and batches of a header arrive unchanged."""
    header = StepRangeHeader(24, 0.25, 0.5, [EncodedBatch(0, 24, b"structure")])
    assert StepRangeHeader.decode(memoryview(header.encode())) == header


def test_a_failure_is_a_traceback_at_most():
    """A failure may have a million characters in JSON's longest notation; a longer one is refused unread."""
    failure = b'{"error": "E", "where": "w", "text": "%s"}'
    assert len(parse_failure(memoryview(failure % (b"\\u1234" * (1 << 20)))).text) == 1 << 20
    with pytest.raises(WireError, match=r"failure that a data host reported has \d+ bytes .*; 33554432 bytes"):
        parse_failure(memoryview(failure % (b" " * (32 << 20))))


@pytest.mark.parametrize(
    ("num_bytes", "batches"),
    [
        (29, [(0, 10, b"one"), (10, 20, b"two")]),
        (30, [(0, 31, b"one")]),
        (30, [(-1, 10, b"one")]),
        (30, [(2**63, 1, b"one")]),
        (30, [(0, 10)]),
        (30, []),
        (30, [(0, 0, b"")] * 257),
        (-1, [(0, 10, b"one")]),
    ],
    ids=["ends later", "is larger", "begins before", "begins far off", "has no structure", "none", "too many", "less"],
)
def test_a_header_that_makes_no_sense_is_refused(num_bytes, batches):
    """A header must have at least one batch, and every batch must lie within the data that arrives."""
    encoded = StepRangeHeader(num_bytes, 0.25, 0.5, batches).encode()
    with pytest.raises(WireError):
        StepRangeHeader.decode(memoryview(encoded))


@given(st.binary(max_size=50))
def test_any_header_is_taken_or_refused(data):
    """Any header is accepted, or refused with a WireError."""
    with contextlib.suppress(WireError):
        StepRangeHeader.decode(memoryview(data))
