"""Answers go to slots, come out in order, and slots are never lost."""

import numpy as np
import pytest

from lightning_sm.data.feeder.pass_buffer import PassBuffer
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.feeder_messages import DeliveredRange, EndOfBlock, EndOfPass, Position
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import SamplePlan, Tail
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.figures import BatchFigures
from lightning_sm.data.protocol.frames import EncodedBatch, StepRangeHeader, pack_batches
from lightning_sm.data.protocol.spec import StepRangeSpec
from lightning_sm.errors import BatchTooLargeError, WireError
from tests.unit.data.feeder.passes import start_pass

NUM_SLOTS = 3


@pytest.fixture
def make():
    """A function that makes a pass over ten steps of two samples, by default from step 4 on, with three slots."""
    ring = Ring.create(NUM_SLOTS, 4096)

    def make_buffer(plan=None, tail=None, first_step=4, stop_step=None, mode="exact", **options):
        plan = plan or SamplePlan(np.arange(20), 2, drop_last=False, rank=0, world_size=1)
        position = Position(3, 0, first_step, stop_step, tail=mode)
        request = start_pass(index=1, seed=2, position=position, **options)
        return PassBuffer(request, ring, list(range(NUM_SLOTS)), plan, tail or Tail())

    yield make_buffer
    ring.close()


@pytest.fixture
def buffer(make):
    """A pass with the usual limits."""
    return make()


def announce(buffer, request_id, num_bytes, produce_s=1.0, num_batches=None):
    """Let the header of an answer come in, by default of as many batches as were requested."""
    num_batches = buffer.in_flight[request_id].step_range.num_steps if num_batches is None else num_batches
    packed = pack_batches([EncodedBatch(0, num_bytes, b"")] * num_batches)
    buffer.take_header(request_id, StepRangeHeader(num_bytes, 0.0, produce_s, packed))


def receive(buffer, request_id, offset, data):
    """Let a piece of an answer come in."""
    piece = begin_piece(buffer, request_id, offset, len(data))
    piece.memory[:] = data
    piece.end(True)


def begin_piece(buffer, request_id, offset, size):
    """Reserve the place of a piece that is not compressed."""
    answer = buffer.in_flight[request_id]

    def ended(piece, is_complete):
        piece.decompress()
        buffer.end_piece(answer, piece, is_complete=is_complete)

    return answer.begin_piece(offset, size, is_compressed=False, ended=ended)


def answer(buffer, request_id, data, produce_s=1.0):
    """Let a whole answer come in."""
    announce(buffer, request_id, len(data), produce_s)
    receive(buffer, request_id, 0, data)
    assert buffer.in_flight[request_id].is_complete
    buffer.accept(request_id, latency_s=1.0)


def test_requests_name_the_keys_of_their_step(buffer):
    """A request holds everything that its batches depend on."""
    spec = StepRangeSpec.decode(buffer.reserve(0, StepRange(5, 2)))
    assert (spec.opening, spec.loader) == ("o", 1)
    assert [(one.seed, one.epoch, one.position) for one in spec.batches] == [(2, 3, 10), (2, 3, 12)]
    assert [one.keys.tolist() for one in spec.batches] == [[10, 11], [12, 13]]


def test_answers_come_out_in_order(buffer):
    """A step waits for those before it, whatever the order in which they came."""
    for request_id, step in ((7, 4), (8, 5), (9, 6)):
        assert buffer.reserve(request_id, StepRange(step, 1))
    answer(buffer, 9, b"six")
    answer(buffer, 8, b"five!")
    assert list(buffer.deliveries()) == []
    answer(buffer, 7, b"four")
    delivered = list(buffer.deliveries())
    assert [one.first_step for one in delivered] == [4, 5, 6]
    received = [bytes(buffer.ring.slot(one.slot)[: one.num_bytes]) for one in delivered]
    assert received == [b"four", b"five!", b"six"]
    assert buffer.next_step == 7


def test_the_last_range_can_be_held(buffer):
    """Everything before it is delivered, and the last range once it is wanted."""
    for request_id, step_range in ((7, StepRange(4, 4)), (8, StepRange(8, 2))):
        assert buffer.reserve(request_id, step_range)
        answer(buffer, request_id, b"batches")
    assert [one.first_step for one in buffer.deliveries(holds_end=True)] == [4]
    assert [one.first_step for one in buffer.deliveries(holds_end=True)] == []
    last, end = buffer.deliveries()
    assert (last.first_step, end) == (8, EndOfPass(1, None))
    assert list(buffer.deliveries()) == []


def test_slots_are_bounded_and_dropped_answers_give_theirs_back(buffer):
    """Without a free slot nothing can be asked for; an answer that is not wanted frees one."""
    assert all(buffer.reserve(number, StepRange(4 + number, 1)) for number in range(NUM_SLOTS))
    assert not buffer.reserve(3, StepRange(7, 1))
    buffer.drop(1)
    buffer.drop(1)
    assert buffer.reserve(3, StepRange(7, 1))
    assert buffer.free == []


def test_a_slot_is_not_given_away_while_a_piece_is_written_to_it(buffer):
    """An answer may be dropped at this moment: its slot is free once the piece is written."""
    buffer.reserve(0, StepRange(4, 1))
    announce(buffer, 0, 3)
    slot = buffer.in_flight[0].slot
    piece = begin_piece(buffer, 0, 0, 3)
    buffer.drop(0)
    assert slot not in buffer.free
    assert piece.memory is None
    piece.end(True)
    assert slot in buffer.free


def test_a_piece_that_is_cut_off_counts_nothing(buffer):
    """The connection is lost within it: the request is dropped later, and its slot is free then, once."""
    buffer.reserve(0, StepRange(4, 1))
    announce(buffer, 0, 3)
    slot = buffer.in_flight[0].slot
    piece = begin_piece(buffer, 0, 0, 3)
    piece.memory[:2] = b"ab"
    piece.end(False)
    assert buffer.in_flight[0].received == 0
    assert slot not in buffer.free
    buffer.drop(0)
    assert buffer.free.count(slot) == 1


def test_a_batch_without_bytes_is_complete_at_once(buffer):
    """Batches of plain numbers have a header only."""
    buffer.reserve(0, StepRange(4, 1))
    assert not buffer.in_flight[0].is_complete
    announce(buffer, 0, 0)
    assert buffer.in_flight[0].is_complete


def test_a_batch_that_does_not_fit_names_both_sizes(buffer):
    """The error names the setting that bounds a batch."""
    buffer.reserve(0, StepRange(4, 1))
    with pytest.raises(
        BatchTooLargeError, match=r"step 4 has 4097 bytes, but a slot only 4096 \(data_service.max_batch_bytes\)"
    ):
        announce(buffer, 0, 4097)


@pytest.mark.parametrize(("offset", "size"), [(1, 3), (0, 11), (2**63, 1)])
def test_bytes_outside_of_what_was_announced_are_refused(buffer, offset, size):
    """A piece that is out of order or too long never touches a slot."""
    buffer.reserve(0, StepRange(4, 1))
    announce(buffer, 0, 10)
    with pytest.raises(WireError, match="arrived after 0 of 10"):
        receive(buffer, 0, offset, bytes(size))
    assert not buffer.ring.slot(buffer.in_flight[0].slot).any()


def test_bytes_before_a_header_and_a_second_header_are_refused(buffer):
    """An answer is one header, then its bytes."""
    buffer.reserve(0, StepRange(4, 1))
    with pytest.raises(WireError, match="arrived after 0 of -1"):
        receive(buffer, 0, 0, b"x")
    announce(buffer, 0, 10)
    with pytest.raises(WireError, match="a second header arrived"):
        announce(buffer, 0, 10)


def test_the_window_is_bounded_in_bytes(buffer):
    """The largest size bounds how many steps are ahead; two always are, and no more before a size is known."""
    assert buffer.window == 2
    buffer.reserve(0, StepRange(4, 1))
    announce(buffer, 0, 1200)
    assert buffer.window == 4
    receive(buffer, 0, 0, bytes(1200))
    buffer.accept(0, latency_s=1.0)
    buffer.reserve(1, StepRange(5, 1))
    answer(buffer, 1, bytes(4000))
    assert buffer.window == 2


def test_the_size_of_batches_without_bytes_is_known(buffer):
    """They open the window, too."""
    buffer.reserve(0, StepRange(4, 1))
    announce(buffer, 0, 0)
    assert buffer.window == 8


def test_quick_small_batches_are_requested_together(make):
    """Runs double, up to what makes 10 ms of work or 8 MiB; the window then counts requests, not batches."""
    buffer = make(window_bytes=1 << 30)
    lengths = []
    for number, step in enumerate((4, 5, 6, 7)):
        buffer.reserve(number, StepRange(step, 1))
        answer(buffer, number, b"tiny", produce_s=0.002)
        buffer.free += [one.slot for one in buffer.deliveries()]
        lengths.append(buffer.range_length)
    assert lengths == [2, 4, 5, 5]
    assert buffer.window == 8 * 5
    buffer.reserve(9, StepRange(8, 1))
    answer(buffer, 9, b"slow", produce_s=1.0)
    assert buffer.range_length == 1


@pytest.mark.parametrize(("window_bytes", "num_bytes", "most"), [(1 << 30, 400, 4), (900, 20, 2)])
def test_runs_fit_into_slots_and_window(make, window_bytes, num_bytes, most):
    """A range has at most half of a slot of 4096 bytes, and an eighth of the window."""
    buffer = make(window_bytes=window_bytes)
    for number, step in enumerate((4, 5, 6, 7)):
        buffer.reserve(number, StepRange(step, 1))
        answer(buffer, number, bytes(num_bytes), produce_s=0.0001)
        buffer.free += [one.slot for one in buffer.deliveries()]
    assert buffer.range_length == most


def test_a_limit_of_the_users_counts_batches(make):
    """Where the user limits the batches ahead, requests are for so few that all workers have one."""
    buffer = make(is_window_fixed=True, window_bytes=1 << 30, window_batches=16)
    for number, step in enumerate((4, 5)):
        buffer.reserve(number, StepRange(step, 1))
        answer(buffer, number, b"tiny", produce_s=0.0001)
    assert (buffer.range_length, buffer.window) == (2, 16)


def test_a_delivery_describes_its_range(make):
    """The training process learns where the batches lie, how long they took, and how many more are ready."""
    buffer = make(tells_keys=True)
    buffer.reserve(0, StepRange(4, 2))
    buffer.reserve(1, StepRange(6, 1))
    answer(buffer, 1, b"six")
    answer(buffer, 0, b"fourfive", produce_s=0.5)
    delivery, _ = buffer.deliveries()
    assert (delivery.first_step, delivery.num_steps, delivery.num_bytes) == (4, 2, 8)
    assert delivery.keys == [[8, 9], [10, 11]]
    assert delivery.figures() == BatchFigures(num_bytes=4, queue_s=0.0, produce_s=0.25, transfer_s=0.25, num_ready=1)
    assert buffer.next_step == 7


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_another_number_of_batches_than_requested_is_refused(buffer, num_batches):
    """Only a shard may end before."""
    buffer.reserve(0, StepRange(4, 2))
    with pytest.raises(WireError, match=f"{num_batches} batches arrived for a request for 2"):
        announce(buffer, 0, 10, num_batches=num_batches)


def test_a_shard_may_end_within_a_range(make):
    """What it has is delivered, its other steps are skipped, and the batches of the block come in rows."""
    buffer = make(ShardSteps(2, 0, 1))
    buffer.plan.range_length = 3
    for number, first in enumerate((0, 3)):
        buffer.reserve(number, StepRange(first, 3))
    for number, num_batches in enumerate((2, 3)):
        announce(buffer, number, 0, num_batches=num_batches)
        buffer.accept(number, latency_s=1.0)
    first, second, end = buffer.deliveries()
    assert [(one.first_step, one.num_steps, one.row) for one in (first, second)] == [(0, 2, 0), (3, 3, 0)]
    assert end == EndOfBlock(1)
    assert buffer.take(6) == 6
    assert [buffer.plan.batch(step).tolist() for step in (6, 7)] == [[2, 1, 3, 1], [2, 1, 4, 1]]


@pytest.mark.parametrize(
    ("next_step", "stop_step", "is_uneven", "held_step"),
    [
        pytest.param(4, None, True, 9, id="to the end"),
        pytest.param(9, None, True, 9, id="the only step"),
        pytest.param(10, None, True, None, id="behind the end"),
        pytest.param(4, 9, True, None, id="the Trainer's limit is before it"),
        pytest.param(4, None, False, None, id="it is even"),
    ],
)
def test_an_uneven_last_step_is_held_back(make, next_step, stop_step, is_uneven, held_step):
    """The pass ends before it, if it would have had it, and says so."""
    tail = Tail(1.2, is_uneven)
    held = make(tail=tail, first_step=next_step, stop_step=stop_step, mode="hold")
    assert held.held_step == held_step
    assert held.stop_step == (held_step or stop_step or 10)
    asked = make(tail=tail, first_step=next_step, stop_step=stop_step)
    assert (asked.held_step, asked.stop_step) == (None, stop_step or 10)


def test_the_last_batch_has_the_weight_of_the_last_step(make):
    """The batches before have that of a full batch."""
    buffer = make(tail=Tail(1.2, is_uneven=True), first_step=6)
    for request_id, step_range in enumerate((StepRange(6, 3), StepRange(9, 1))):
        buffer.reserve(request_id, step_range)
        answer(buffer, request_id, b"batch")
    weights = [one.tail_weight for one in buffer.deliveries() if isinstance(one, DeliveredRange)]
    assert weights == [1.0, 1.2]
