"""Streams that yield the same in several virtual shards."""

import pytest

from lightning_sm.data.feeder.equal_shards import EqualShards
from lightning_sm.data.feeder.pass_buffer import PassBuffer
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import Tail
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.frames import EncodedBatch, StepRangeHeader, pack_batches
from tests.unit.data.feeder.passes import in_flight, start_pass


@pytest.fixture
def ring():
    """Memory for the batches."""
    ring = Ring.create(1, 4096)
    yield ring
    ring.close()


def open_pass(ring, pass_id=1, shards=6, ranks=2, loader=0):
    """Return a pass of rank 1 of two over six shards, three of which are its own."""
    plan = ShardSteps(shards, 1 % ranks, ranks)
    return PassBuffer(start_pass(pass_id, index=loader, order="shards"), ring, [0], plan, Tail())


def deliver(check, buffer, *batches, first=0):
    """Deliver batches, each of one letter, one after the other; return the texts of errors."""
    errors = []
    for step, letter in enumerate(batches, first):
        buffer.ring.slot(0)[:5] = ord(letter)
        answer = StepRangeHeader(5, 0.0, 0.0, pack_batches([EncodedBatch(0, 5, b"uint8")]))
        errors.append(check.offer(buffer, in_flight(buffer, StepRange(step, 1), answer)))
    return [str(error) for error in errors if error is not None]


def test_equal_shards_are_named_once(ring):
    """The error has both shards, and what to do."""
    check = EqualShards("error")
    (text,) = deliver(check, open_pass(ring), *"aaaxxxabc")  # shards 1, 3 and 5 in turn
    assert "Shards 1 and 5 of 6 of train_dataloader() (data_service.virtual_shards) begin with the same 2" in text
    assert "2 of 3 compared shards begin like an earlier one" in text
    assert "get_worker_info()" in text
    assert "data_service.verify=warn" in text
    assert deliver(check, open_pass(ring, 2), *"aaabbb") == []


@pytest.mark.parametrize("batches", ["abcdef", "aaabcd", "aaaaaa", "aba", "abaxyx"])
def test_shards_that_may_begin_alike(ring, batches):
    """With different data, the same padding, constants, a single batch, or by chance."""
    assert deliver(EqualShards("error"), open_pass(ring), *batches) == []


@pytest.mark.parametrize(("mode", "num_warnings"), [("warn", 1), ("off", 0)])
def test_equal_shards_that_are_meant(ring, caplog, mode, num_warnings):
    """One warning, or nothing."""
    assert deliver(EqualShards(mode), open_pass(ring), *"aaabbb") == []
    assert len(caplog.records) == num_warnings


def test_fewer_files_than_shards(ring):
    """Half of the shards read what the others read."""
    buffer = open_pass(ring, shards=8, ranks=1)
    (text,) = deliver(EqualShards("error"), buffer, *"abcdabcdstuvstuv")
    assert "Shards 3 and 7 of 8" in text
    assert deliver(EqualShards("error"), buffer, *"abcdabcxstuvstuv") == []


def test_a_single_shard_is_compared_with_none(ring):
    """Those of other ranks are not here."""
    assert deliver(EqualShards("error"), open_pass(ring, shards=2), *"abab") == []


def test_passes_of_several_loaders_and_a_pass_that_ended_early(ring):
    """Loaders are read in turn, and a pass may be closed before all its shards have begun."""
    check = EqualShards("error")
    first, second = open_pass(ring), open_pass(ring, 2, loader=1)
    assert deliver(check, first, *"abc") == deliver(check, second, *"abc") == []
    assert deliver(check, first, *"xyz", first=3) == deliver(check, second, *"xyz", first=3) == []
    check = EqualShards("error")
    assert deliver(check, open_pass(ring, 3), *"aaabc") == []
    assert deliver(check, open_pass(ring, 4), *"bbbccc") != []


def test_an_answer_of_several_batches(ring):
    """A request may be for the first batches of a shard at once."""
    check, buffer = EqualShards("error"), open_pass(ring)
    buffer.plan.range_length = 4
    buffer.ring.slot(0)[:8] = range(8)
    batches = pack_batches([EncodedBatch(2 * number, 2, b"uint8") for number in range(4)])
    header = StepRangeHeader(8, 0.0, 0.0, batches)
    answers = [in_flight(buffer, StepRange(step, 4), header) for step in (0, 4, 8)]
    errors = [check.offer(buffer, answer) for answer in answers]
    assert errors[:2] == [None, None]
    assert "Shards 1 and 5" in str(errors[2])
