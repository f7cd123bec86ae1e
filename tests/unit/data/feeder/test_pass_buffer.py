"""Answers go to slots, come out in order, and slots are never lost."""

import numpy as np
import pytest

from lightning_sm.data.feeder.pass_buffer import Intake
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import SamplePlan
from lightning_sm.data.protocol.spec import BatchSpec
from lightning_sm.errors import BatchTooLargeError, WireError

NUM_SLOTS = 3


@pytest.fixture
def intake():
    """A pass over ten steps of two samples, from step 4 on, with three slots."""
    ring = Ring.create(NUM_SLOTS, 4096)
    plan = SamplePlan(np.arange(20), 2, drop_last=False, rank=0, world_size=1)
    template = BatchSpec("o", 1, 2, 3, 0, 0, 0, np.empty(0, np.int64))
    free = list(range(NUM_SLOTS))
    yield Intake(1, ring, 1, free, template, plan, 4, 10, window_batches=8, window_bytes=5000)
    ring.close()


def answer(intake, request_id, data):
    """Let a whole answer come in."""
    intake.take_header(request_id, len(data), (0.0, 0.0), b"header")
    intake.take_data(request_id, 0, memoryview(data))
    assert intake.arrivals[request_id].is_complete
    intake.accept(request_id)


def test_requests_name_the_keys_of_their_step(intake):
    """A request holds everything that its batch depends on."""
    spec = BatchSpec.decode(intake.spec(5))
    assert (spec.opening, spec.loader, spec.seed, spec.epoch, spec.step) == ("o", 1, 2, 3, 5)
    assert spec.keys.tolist() == [10, 11]


def test_answers_come_out_in_order(intake):
    """A step waits for those before it, whatever the order in which they came."""
    for request_id, step in ((7, 4), (8, 5), (9, 6)):
        assert intake.begin(request_id, step)
    answer(intake, 9, b"six")
    answer(intake, 8, b"five!")
    assert intake.deliverable() == []
    answer(intake, 7, b"four")
    arrivals = intake.deliverable()
    assert [arrival.step for arrival in arrivals] == [4, 5, 6]
    assert [bytes(intake.ring.slot(a.slot)[: a.num_bytes]) for a in arrivals] == [b"four", b"five!", b"six"]
    assert intake.next_step == 7


def test_slots_are_bounded_and_dropped_answers_give_theirs_back(intake):
    """Without a free slot nothing can be asked for; an answer that is not wanted frees one."""
    assert all(intake.begin(number, 4 + number) for number in range(NUM_SLOTS))
    assert not intake.begin(3, 7)
    intake.drop(1)
    intake.drop(1)
    assert intake.begin(3, 7)
    assert intake.free == []


def test_a_batch_without_bytes_is_complete_at_once(intake):
    """Batches of plain numbers have a header only."""
    intake.begin(0, 4)
    assert not intake.arrivals[0].is_complete
    intake.take_header(0, 0, (0.0, 0.0), b"header")
    assert intake.arrivals[0].is_complete


def test_a_batch_that_does_not_fit_names_both_sizes(intake):
    """The error names the setting that bounds a batch."""
    intake.begin(0, 4)
    with pytest.raises(
        BatchTooLargeError, match=r"step 4 has 4097 bytes, a slot 4096 \(data_service.max_batch_bytes\)"
    ):
        intake.take_header(0, 4097, (0.0, 0.0), b"")


@pytest.mark.parametrize(("offset", "size"), [(1, 3), (0, 11), (2**63, 1)])
def test_bytes_outside_of_what_was_announced_are_refused(intake, offset, size):
    """A piece that is out of order or too long never touches a slot."""
    intake.begin(0, 4)
    intake.take_header(0, 10, (0.0, 0.0), b"")
    with pytest.raises(WireError, match="came after 0 of 10"):
        intake.take_data(0, offset, memoryview(bytes(size)))
    assert not intake.ring.slot(intake.arrivals[0].slot).any()


def test_bytes_before_a_header_and_a_second_header_are_refused(intake):
    """An answer is one header, then its bytes."""
    intake.begin(0, 4)
    with pytest.raises(WireError, match="came after 0 of -1"):
        intake.take_data(0, 0, memoryview(b"x"))
    intake.take_header(0, 10, (0.0, 0.0), b"")
    with pytest.raises(WireError, match="a second header came for step 4"):
        intake.take_header(0, 10, (0.0, 0.0), b"")


def test_the_window_is_bounded_in_bytes(intake):
    """Once sizes are known, the largest bounds how many steps are ahead; two always are, to overlap."""
    assert intake.window == 8
    intake.begin(0, 4)
    answer(intake, 0, bytes(1200))
    assert intake.window == 4
    intake.begin(1, 5)
    answer(intake, 1, bytes(4000))
    assert intake.window == 2
