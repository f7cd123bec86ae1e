"""Tests of an iterator's batches in the feeder: requests, slots, windows, ends, and delivery in order."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_sm.data.feeder.iterator_buffer import IteratorBuffer
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.feeder_messages import EndOfPass, StartIterator
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.frames import EncodedBatch, StepRangeHeader
from lightning_sm.errors import BatchTooLargeError, WireError

SLOT_BYTES = 1 << 16
REQUEST = StartIterator(
    pass_id=7,
    loader="train_dataloader()",
    source="d" * 32,
    is_stream=False,
    fetch=FetchSpec("train", rank=1, world_size=2, seed=-3, first=10, num_batches=1, indices=[]),
    ring=4,
    window_batches=16,
    is_window_fixed=False,
    window_bytes=1 << 20,
)
STREAM = replace(REQUEST, is_stream=True)


@pytest.fixture
def ring():
    """A ring of three slots."""
    ring = Ring.create(3, SLOT_BYTES)
    yield ring
    ring.close()


def make(ring, request=REQUEST, num_batches=0, *, is_end=False, **options):
    """Return a buffer with the indices of some batches, and the free slots of its ring."""
    free = list(range(ring.num_slots))
    buffer = IteratorBuffer(request, ring, free, **options)
    if not request.is_stream:
        buffer.supply([pickle.dumps([number, number + 1]) for number in range(num_batches)], is_end=is_end)
    return buffer, free


def reserve(buffer, request_id, step_range):
    """Take a free slot for a request, and return the encoded request."""
    return buffer.expect(request_id, step_range, buffer.limits.free.pop())


def header_of(num_batches, batch_bytes, produce_s=0.0):
    """Return the header of an answer."""
    batches = [EncodedBatch(number * batch_bytes, batch_bytes, b"structure") for number in range(num_batches)]
    return StepRangeHeader(num_batches * batch_bytes, 0.25, produce_s, batches)


def answer(buffer, request_id, header):
    """Let a whole answer arrive."""
    buffer.take_header(request_id, header)
    in_flight = buffer.in_flight[request_id]
    if header.num_bytes:
        piece = in_flight.begin_piece(0, header.num_bytes, lambda *_: None)
        piece.memory[:] = bytes([request_id]) * header.num_bytes
        buffer.end_piece(in_flight)
    return buffer.accept(request_id, latency_s=1.0)


def test_a_request_has_what_the_sampler_has_yielded(ring):
    """A request has the sampler's indices, and counts batches from the start of the epoch, even in a resumed run."""
    buffer, free = make(ring, num_batches=5)
    spec = FetchSpec.decode(reserve(buffer, 1, StepRange(2, 3)))
    assert spec == FetchSpec("train", 1, 2, -3, 12, 3, [pickle.dumps([n, n + 1]) for n in (2, 3, 4)])
    assert len(free) == 2
    assert buffer.keys(3) == [3, 4]


def test_a_stream_has_no_indices(ring):
    """A stream has no indices: each of its batches may be requested at once, and messages name none."""
    buffer, _ = make(ring, STREAM)
    assert buffer.limits.known > 1 << 60
    assert FetchSpec.decode(reserve(buffer, 1, StepRange(0, 2))).indices == []
    assert buffer.keys(0) == []


def test_a_dropped_request_returns_its_slot(ring):
    """A request returns its slot when it is dropped, once."""
    buffer, free = make(ring, num_batches=9)
    for number in range(3):
        reserve(buffer, number, StepRange(number, 1))
    assert free == []
    buffer.drop(1)
    buffer.drop(1)
    assert free == [1]


def test_a_slot_is_free_only_once_nothing_is_written_to_it(ring):
    """If a request is cancelled while a piece of its answer arrives, its slot is free only after that piece."""
    buffer, free = make(ring, num_batches=1)
    reserve(buffer, 1, StepRange(0, 1))
    buffer.take_header(1, header_of(1, 100))
    in_flight = buffer.in_flight[1]
    piece = in_flight.begin_piece(0, 50, lambda *_: None)
    buffer.drop(1)
    assert piece.memory is None
    assert len(free) == 2
    buffer.end_piece(in_flight, is_complete=False)
    assert len(free) == 3


def test_batches_are_delivered_in_order(ring):
    """Batches are delivered in order, however they arrive; the end follows the last one, once."""
    buffer, _ = make(ring, num_batches=4, is_end=True)
    for request_id, first in enumerate((0, 1, 2)):
        reserve(buffer, request_id, StepRange(first, 2 if first == 2 else 1))
    answer(buffer, 2, header_of(2, 10))
    answer(buffer, 1, header_of(1, 0))
    assert list(buffer.deliveries()) == []
    taken = answer(buffer, 0, header_of(1, 10, produce_s=0.5))
    assert taken.transfer_s == pytest.approx(0.25), "of a second, a quarter in the queue and a half in the worker"
    *ranges, end = buffer.deliveries()
    assert [(one.first_step, one.num_steps, one.num_bytes, one.figures.num_ready) for one in ranges] == [
        (0, 1, 10, 3),
        (1, 1, 0, 2),
        (2, 2, 20, 0),
    ]
    assert {one.pass_id for one in ranges} == {7}
    assert np.asarray(ring.slot(ranges[2].slot)[:20]).tolist() == [2] * 20
    assert end == EndOfPass(7)
    assert list(buffer.deliveries()) == []
    assert list(buffer.ready) == [2, 1, 0], "their slots are freed if the consumer closes the pass"
    buffer.take(2)
    assert list(buffer.ready) == [2]


def test_the_end_may_come_behind_the_last_batch(ring):
    """The end is delivered even if the sampler reports it only after the last batch."""
    buffer, _ = make(ring, num_batches=1)
    reserve(buffer, 1, StepRange(0, 1))
    answer(buffer, 1, header_of(1, 10))
    assert len(list(buffer.deliveries())) == 1
    buffer.supply([], is_end=True)
    assert list(buffer.deliveries()) == [EndOfPass(7)]


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_stream_ends_with_an_answer_that_has_fewer_batches(ring, comes_first):
    """A stream ends with an answer that has fewer batches; requests beyond get none, whichever answer is first."""
    buffer, free = make(ring, STREAM)
    for request_id, first in enumerate((0, 2)):
        reserve(buffer, request_id, StepRange(first, 2))
    if comes_first:
        buffer.skip(1, end=11)
    answer(buffer, 0, header_of(1, 10))
    assert buffer.limits.stop_step == 1
    if not comes_first:
        buffer.skip(1, end=11)
    first, end = buffer.deliveries()
    assert (first.num_steps, end) == (1, EndOfPass(7))
    assert len(free) == 2


def test_a_stream_keeps_what_was_delivered(ring):
    """If another host finds the stream shorter, the pass ends after the batches that have been delivered."""
    buffer, _ = make(ring, STREAM)
    for request_id, first in enumerate((0, 2)):
        reserve(buffer, request_id, StepRange(first, 2))
    answer(buffer, 0, header_of(2, 10))
    assert len(list(buffer.deliveries())) == 1
    buffer.skip(1, end=11)
    assert buffer.limits.stop_step == 2
    assert list(buffer.deliveries()) == [EndOfPass(7)]


def test_only_streams_end_early(ring):
    """An answer with too few batches is an error for an indexed dataset, which has every batch."""
    buffer, _ = make(ring, num_batches=2)
    reserve(buffer, 1, StepRange(0, 2))
    with pytest.raises(WireError, match="only streams have an end"):
        buffer.skip(1, end=0)
    with pytest.raises(WireError, match="1 batches arrived for a request for 2"):
        buffer.take_header(1, header_of(1, 10))


def test_a_batch_that_does_not_fit_is_an_error():
    """The error for a batch that does not fit names the step, both sizes and the setting."""
    ring = Ring.create(1, 4096)
    buffer, _ = make(ring, num_batches=1)
    reserve(buffer, 1, StepRange(0, 1))
    too_large = r"step 0 has 5000 bytes, but a slot has only 4096 \(data_service\.max_ba"
    with pytest.raises(BatchTooLargeError, match=too_large):
        buffer.take_header(1, header_of(1, 5000))
    ring.close()


def test_the_window_follows_from_the_largest_batch(ring):
    """The window is two batches until a size is known, then as many as the byte limit allows."""
    buffer, _ = make(ring, replace(REQUEST, window_bytes=10 << 12), num_batches=3)
    assert buffer.limits.window == 2
    reserve(buffer, 1, StepRange(0, 1))
    buffer.take_header(1, header_of(1, 1 << 12))
    assert buffer.limits.window == 10
    assert make(ring, largest=1 << 19)[0].limits.window == 2
    assert make(ring, largest=1)[0].limits.window == 16


@pytest.mark.parametrize(
    ("batch_bytes", "produce_s", "is_fixed", "lengths"),
    [
        (10, 0.0, False, [2, 4, 8]),
        (10, 0.003, False, [2, 3, 3]),
        (9000, 0.0, False, [2, 3, 3]),
        (1 << 15, 0.0, False, [1, 1, 1]),
        (10, 0.0, True, [2, 2, 2]),
    ],
    ids=["small", "slow", "large", "half a slot", "window of the user's"],
)
def test_a_request_is_for_as_many_batches_as_the_limits_allow(ring, batch_bytes, produce_s, is_fixed, lengths):
    """A range at most doubles, is at most 1/8 of a fixed window, and is shorter for large or slow batches."""
    buffer, free = make(ring, replace(STREAM, is_window_fixed=is_fixed))
    found = []
    for request_id in range(3):
        reserve(buffer, request_id, StepRange(request_id, 1))
        answer(buffer, request_id, header_of(1, batch_bytes, produce_s))
        free.extend(one.slot for one in buffer.deliveries())
        found.append(buffer.limits.range_length)
    assert found == lengths
