"""Answers go to slots, come out in order, and slots are never lost."""

import numpy as np
import pytest

from lightning_sm.data.feeder.pass_buffer import PassBuffer
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import SamplePlan
from lightning_sm.data.protocol.spec import BatchSpec
from lightning_sm.errors import BatchTooLargeError, WireError

NUM_SLOTS = 3


@pytest.fixture
def buffer():
    """A pass over ten steps of two samples, from step 4 on, with three slots."""
    ring = Ring.create(NUM_SLOTS, 4096)
    plan = SamplePlan(np.arange(20), 2, drop_last=False, rank=0, world_size=1)
    template = BatchSpec("o", 1, 2, 3, 0, 0, 0, np.empty(0, np.int64))
    free = list(range(NUM_SLOTS))
    yield PassBuffer(1, ring, 1, free, template, plan, 4, 10, window_batches=8, window_bytes=5000)
    ring.close()


def answer(buffer, request_id, data):
    """Let a whole answer come in."""
    buffer.take_header(request_id, len(data), 0.0, 0.0, b"header")
    buffer.take_data(request_id, 0, memoryview(data))
    assert buffer.in_flight[request_id].is_complete
    buffer.accept(request_id, latency_s=1.0)


def test_requests_name_the_keys_of_their_step(buffer):
    """A request holds everything that its batch depends on."""
    spec = BatchSpec.decode(buffer.request(0, 5))
    assert (spec.opening, spec.loader, spec.seed, spec.epoch, spec.step) == ("o", 1, 2, 3, 5)
    assert spec.keys.tolist() == [10, 11]


def test_answers_come_out_in_order(buffer):
    """A step waits for those before it, whatever the order in which they came."""
    for request_id, step in ((7, 4), (8, 5), (9, 6)):
        assert buffer.request(request_id, step)
    answer(buffer, 9, b"six")
    answer(buffer, 8, b"five!")
    assert buffer.deliverable() == []
    answer(buffer, 7, b"four")
    batches = buffer.deliverable()
    assert [batch.step for batch in batches] == [4, 5, 6]
    assert [bytes(buffer.ring.slot(batch.slot)[: batch.num_bytes]) for batch in batches] == [b"four", b"five!", b"six"]
    assert buffer.next_step == 7


def test_slots_are_bounded_and_dropped_answers_give_theirs_back(buffer):
    """Without a free slot nothing can be asked for; an answer that is not wanted frees one."""
    assert all(buffer.request(number, 4 + number) for number in range(NUM_SLOTS))
    assert not buffer.request(3, 7)
    buffer.drop(1)
    buffer.drop(1)
    assert buffer.request(3, 7)
    assert buffer.free == []


def test_a_batch_without_bytes_is_complete_at_once(buffer):
    """Batches of plain numbers have a header only."""
    buffer.request(0, 4)
    assert not buffer.in_flight[0].is_complete
    buffer.take_header(0, 0, 0.0, 0.0, b"header")
    assert buffer.in_flight[0].is_complete


def test_a_batch_that_does_not_fit_names_both_sizes(buffer):
    """The error names the setting that bounds a batch."""
    buffer.request(0, 4)
    with pytest.raises(
        BatchTooLargeError, match=r"step 4 has 4097 bytes, but a slot only 4096 \(data_service.max_batch_bytes\)"
    ):
        buffer.take_header(0, 4097, 0.0, 0.0, b"")


@pytest.mark.parametrize(("offset", "size"), [(1, 3), (0, 11), (2**63, 1)])
def test_bytes_outside_of_what_was_announced_are_refused(buffer, offset, size):
    """A piece that is out of order or too long never touches a slot."""
    buffer.request(0, 4)
    buffer.take_header(0, 10, 0.0, 0.0, b"")
    with pytest.raises(WireError, match="arrived after 0 of 10"):
        buffer.take_data(0, offset, memoryview(bytes(size)))
    assert not buffer.ring.slot(buffer.in_flight[0].slot).any()


def test_bytes_before_a_header_and_a_second_header_are_refused(buffer):
    """An answer is one header, then its bytes."""
    buffer.request(0, 4)
    with pytest.raises(WireError, match="arrived after 0 of -1"):
        buffer.take_data(0, 0, memoryview(b"x"))
    buffer.take_header(0, 10, 0.0, 0.0, b"")
    with pytest.raises(WireError, match="a second header arrived for step 4"):
        buffer.take_header(0, 10, 0.0, 0.0, b"")


def test_the_window_is_bounded_in_bytes(buffer):
    """Once sizes are known, the largest bounds how many steps are ahead; two always are, to overlap."""
    assert buffer.window == 8
    buffer.request(0, 4)
    answer(buffer, 0, bytes(1200))
    assert buffer.window == 4
    buffer.request(1, 5)
    answer(buffer, 1, bytes(4000))
    assert buffer.window == 2
