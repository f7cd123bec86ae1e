"""Which batches are built twice, by whom, and what follows from the outcome."""

import json
import logging

import numpy as np
import pytest

from lightning_sm.data.feeder.batch_difference import BatchDifference
from lightning_sm.data.feeder.pass_buffer import PassBuffer
from lightning_sm.data.feeder.scheduler import StepRange
from lightning_sm.data.feeder.verification import MISSING, Verifier
from lightning_sm.data.ipc.feeder_messages import Position
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import SamplePlan, Tail
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.frames import EncodedBatch, StepRangeHeader, pack_batches
from lightning_sm.data.protocol.spec import ANOTHER_HOST, StepRangeSpec
from lightning_sm.errors import DataHostMismatchError, WireError
from tests.unit.data.feeder.passes import in_flight, start_pass

NUM_STEPS = 10_000
EXACT = BatchDifference('batch["label"][1]', ("3", "7"), rows=(1,), num_different=1, num_elements=4)
INEXACT = EXACT._replace(is_inexact=True)


def structure(num_values):
    """The header of a batch of bytes."""
    return json.dumps(["lsm-batch", 1, num_values, ["t", 0, "uint8", [num_values], None, 0]]).encode()


def header(data, num_batches=1, worker=0, start=0):
    """The header of an answer with batches of these bytes each."""
    batches = [
        EncodedBatch(start + len(data) * number, len(data), structure(len(data))) for number in range(num_batches)
    ]
    return StepRangeHeader(len(data) * num_batches + start, 0.0, 0.0, pack_batches(batches), worker)


@pytest.fixture
def ring():
    """Memory for the batches."""
    ring = Ring.create(2, 4096)
    yield ring
    ring.close()


def open_pass(ring, *, epoch=0, rank=0, opening="o", plan=None, **options):
    """Return a pass over many steps of two samples."""
    plan = plan or SamplePlan(np.arange(2 * NUM_STEPS), 2, drop_last=False, rank=0, world_size=1)
    request = start_pass(1, opening, rank=rank, position=Position(epoch), **options)
    return PassBuffer(request, ring, [0, 1], plan, Tail())


def offer(verifier, buffer, step, host="a", up="ab", num_batches=1, worker=0, transfer_s=0.0):
    """Offer an answer, and return the check that begins."""
    data = bytes(range(4))
    for number in range(num_batches):
        buffer.ring.slot(0)[4 * number : 4 * number + 4] = np.frombuffer(data, np.uint8) + number
    answer = in_flight(buffer, StepRange(step, num_batches), header(data, num_batches, worker), transfer_s)
    verifier.offer(buffer, answer, host, list(up), now=0.0)
    return verifier.check


def make(mode="error", share=0.0):
    """Return a verifier of hosts whose names are their addresses in capitals."""
    return Verifier(mode, share, str.upper)


def agree(verifier, host):
    """Let the second build come from a host, and be equal."""
    check = verifier.check
    verifier.request(check, 1, host)
    assert verifier.compared(check, None) is None


def test_each_host_is_compared_with_the_others_once(ring):
    """For each loader a batch of every host is built by another one, until all are connected, and then no more."""
    verifier, buffer = make(), open_pass(ring)
    assert offer(verifier, buffer, 0, "a", "abcd").candidates == ["b", "c", "d"]
    agree(verifier, "c")
    assert offer(verifier, buffer, 1, "a", "abcd").candidates == ["b", "d"]
    agree(verifier, "d")
    assert offer(verifier, buffer, 2, "b", "abcd").candidates == ["a", "c", "d"]
    agree(verifier, "a")
    assert offer(verifier, buffer, 3, "b", "abcd") is None
    assert offer(verifier, buffer, 4, "a", "abcde").candidates == ["e"]
    agree(verifier, "e")
    assert offer(verifier, open_pass(ring, epoch=1), 0, "e", "abcde") is None
    assert offer(verifier, open_pass(ring, opening="other"), 0, "e", "abcde").candidates == list("abcd")


@pytest.mark.parametrize("share", [0.0, 5e-324])
def test_without_a_share_only_first_batches_are_checked(ring, share):
    """A share of nothing, or almost nothing, is none."""
    assert offer(make(share=share), open_pass(ring, rank=1), 0) is None
    assert offer(make(share=share), open_pass(ring), 0) is not None


def test_only_rank_0_checks_first_batches(ring):
    """The other ranks only check their share: 64 ranks would build the first batches of a loader 64 times."""
    assert offer(make(), open_pass(ring, rank=1), 0) is None
    assert offer(make(share=1.0), open_pass(ring, rank=1), 0) is not None


def test_the_only_host_builds_it_again_by_another_worker(ring):
    """With one host, the request names the worker that built the batch; with several, none of that host has."""
    verifier, buffer = make(), open_pass(ring)
    check = offer(verifier, buffer, 0, "a", "a", worker=3)
    assert StepRangeSpec.decode(verifier.request(check, 7, "a")).built_by == 3
    assert verifier.compared(check, None) is None
    assert offer(verifier, buffer, 1, "a", "a") is None
    check = offer(verifier, buffer, 2, "a", "ab", worker=3)
    spec = StepRangeSpec.decode(verifier.request(check, 8, "b"))
    assert (spec.built_by, [batch.position for batch in spec.batches]) == (ANOTHER_HOST, [4])
    assert spec.batches[0].keys.tolist() == [4, 5]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("range_length", [1, 7])
def test_the_share_of_batches(ring, share, range_length):
    """Over many steps, the share of them is checked, however many batches share a request; the choice is repeatable."""

    def chosen(epoch):
        verifier, buffer, steps = make(share=share), open_pass(ring, epoch=epoch, rank=1), []
        for step in range(0, NUM_STEPS - range_length, range_length):
            check = offer(verifier, buffer, step, num_batches=range_length)
            if check is not None:
                steps.append(check.step)
                agree(verifier, "b")
        return steps

    steps = chosen(0)
    assert steps == chosen(0)
    if range_length == 1:
        assert len(steps) == pytest.approx(NUM_STEPS / round(1 / share), abs=1)
    else:
        assert len(steps) <= NUM_STEPS / round(1 / share) + 1
    if share < 0.1:
        assert steps != chosen(1)


def test_short_passes_have_their_share(ring):
    """The steps that are checked differ between passes, so that passes of a few batches have the share, too."""
    verifier = make(share=0.01)
    num_checks = 0
    for epoch in range(2000):
        if offer(verifier, open_pass(ring, epoch=epoch, rank=1), 0, num_batches=5) is not None:
            num_checks += 1
            agree(verifier, "b")
    assert num_checks == pytest.approx(2000 * 5 / 100, rel=0.4)


def test_nothing_is_checked_without_verify(ring):
    """Turned off, no batch is copied."""
    assert offer(make("off", 1.0), open_pass(ring), 0) is None


def test_one_batch_at_a_time(ring):
    """While a batch is checked, no other one is copied."""
    verifier, buffer = make(share=1.0), open_pass(ring)
    check = offer(verifier, buffer, 0)
    assert offer(verifier, buffer, 1) is check


def test_a_copy_is_compared(ring):
    """The slot may be used again: the first build is a copy of the batch alone, out of those that share the slot."""
    verifier, buffer = make(share=0.3), open_pass(ring, rank=1)
    check = offer(verifier, buffer, 0, num_batches=3)
    step = check.step
    ring.slot(0)[:] = 99
    assert check.first.data.tolist() == [step, step + 1, step + 2, step + 3]


def test_only_the_first_batch_of_a_shard_is_checked(ring):
    """Another worker would have to read the shard up to any other one."""
    buffer = open_pass(ring, plan=ShardSteps(2, 0, 1))
    assert [buffer.plan.batch(step).tolist()[1:3] for step in range(4)] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert [offer(make(share=1.0), buffer, step) is not None for step in range(4)] == [True, True, False, False]
    assert offer(make(), buffer, 1, "b").is_shard


def answered(verifier, check, data=bytes(range(4)), **options):
    """Let the second build come in two pieces."""
    verifier.request(check, 7, options.pop("host", "b"))
    check.take_header(header(data, **options))
    assert not check.second.is_complete
    for offset in (0, 2):
        piece = begin_piece(check, offset, len(data[offset : offset + 2]))
        piece.memory[:] = data[offset : offset + 2]
        piece.end(True)
    assert check.second.is_complete


def begin_piece(check, offset, size, *, is_compressed=False):
    """Reserve the place of a piece of the second build."""
    second = check.second
    return second.begin_piece(
        offset, size, is_compressed=is_compressed, ended=lambda piece, is_complete: second.end_piece(piece)
    )


def test_the_second_build_is_compared_with_the_first(ring):
    """An equal one is equal; another one differs where it does."""
    verifier = make()
    check = offer(verifier, open_pass(ring), 0)
    answered(verifier, check)
    assert check.difference() is None
    verifier = make()
    check = offer(verifier, open_pass(ring), 0)
    answered(verifier, check, bytes([0, 9, 2, 3]))
    assert check.difference().path == "batch[1]"


def test_what_does_not_fit_the_request_violates_the_protocol(ring):
    """Several batches, too many bytes, pieces out of order or too many are errors of the host that sends them."""
    check = offer(make(), open_pass(ring), 0)
    for wrong in (header(bytes(4), 2), header(bytes(4), start=4), header(bytes(5000))):
        with pytest.raises(WireError):
            check.take_header(wrong)
    check.take_header(header(bytes(4)))
    with pytest.raises(WireError, match="compression is off"):
        begin_piece(check, 0, 4, is_compressed=True)
    with pytest.raises(WireError, match="a second header"):
        check.take_header(header(bytes(4)))
    for offset, size in ((1, 1), (0, 5)):
        with pytest.raises(WireError, match="arrived after 0 of 4"):
            begin_piece(check, offset, size)


def test_frames_belong_to_the_request_and_its_host(ring):
    """Frames of another request or host, and those that come after the batch is complete, are not the check's."""
    verifier = make()
    check = offer(verifier, open_pass(ring), 0)
    assert verifier.awaited(7, "b") is None
    verifier.request(check, 7, "b")
    assert [verifier.awaited(*frame) for frame in ((7, "b"), (7, "a"), (8, "b"))] == [check, None, None]
    answered(verifier, check)
    assert verifier.awaited(7, "b") is None


def test_idle_hosts_come_first_but_not_for_ever(ring):
    """At first the second build waits for an idle host; after a while, it takes the place of another request."""
    verifier = make()
    check = offer(verifier, open_pass(ring), 0)
    assert [verifier.is_waiting(now, is_urgent=False) for now in (0.0, 9.0)] == [True, True]
    assert [verifier.is_waiting(now, is_urgent=True) for now in (0.0, 9.0)] == [False, True]
    verifier.request(check, 7, "b")
    assert not verifier.is_waiting(9.0, is_urgent=False)
    assert [verifier.is_late(now) for now in (9.0, 1000.0)] == [False, True]


def test_a_pass_does_not_end_before_its_check(ring):
    """The end of a pass waits for a check of the same loader, somewhat longer than the first build took."""
    verifier, buffer = make(), open_pass(ring)
    assert not verifier.holds(buffer, 0.0)
    check = offer(verifier, buffer, 0)
    assert [verifier.holds(buffer, now) for now in (1.0, 3.0)] == [True, False]
    verifier.give_up(check, "a reason")
    check = offer(verifier, buffer, 1, transfer_s=1.0)
    assert [verifier.holds(buffer, now) for now in (4.0, 6.0)] == [True, False]
    verifier.give_up(check, "a reason")
    check = offer(verifier, buffer, 2, transfer_s=60.0)
    assert [verifier.holds(buffer, now) for now in (9.0, 11.0)] == [True, False]
    assert not verifier.holds(open_pass(ring, opening="other"), 1.0)
    verifier.give_up(check, "a reason")
    assert not verifier.holds(buffer, 1.0)


def test_a_check_without_an_outcome_is_tried_again_but_not_for_ever(ring):
    """If the second host is lost, the next batch is checked; after a few such losses, only the share is."""
    verifier, buffer = make(), open_pass(ring)
    for step in range(4):
        verifier.give_up(offer(verifier, buffer, step), "the connection was lost")
    assert offer(verifier, buffer, 4) is None


@pytest.mark.parametrize("error", ["WorkerLost", "NotOpen", "ShardMoved"])
def test_a_lost_second_build_is_no_difference(ring, caplog, error):
    """What has other causes than the batch is not worth a warning."""
    verifier = make()
    check = offer(verifier, open_pass(ring), 0)
    verifier.request(check, 7, "b")
    verifier.failed(check, Failure(error, "gone"))
    assert verifier.check is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_user_code_that_fails_the_second_time_is_warned_of_once(ring, caplog):
    """The warning names batch, hosts, place and exception."""
    verifier, buffer = make(), open_pass(ring)
    for step in range(2):
        check = offer(verifier, buffer, step)
        verifier.request(check, 7, "b")
        verifier.failed(check, Failure("RemoteTransformError", "OSError: no such file", "index 1, worker 0", "Trace"))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(
        "batch 0 of train_dataloader() was built by data host A, but could not be built again by data host B, "
        "index 1, worker 0: OSError: no such file. Compare"
    )


def outcome(verifier, buffer, found, host="b", worker=0):
    """Let a check end with a difference, and return the error."""
    check = offer(verifier, buffer, 0, "a", [host])
    answered(verifier, check, host=host, worker=worker)
    return verifier.compared(check, found)


def test_the_error_names_everything(ring):
    """Leaf, both values with their hosts, batch, sample, number of elements, causes and advice."""
    verifier = make()
    error = outcome(verifier, open_pass(ring), EXACT)
    assert isinstance(error, DataHostMismatchError)
    first, second = str(error).splitlines()
    assert first == (
        'Data hosts build different batches: batch["label"][1] is 3 on data host A, but 7 on data host B (batch 0 of '
        "train_dataloader(), sample with index 1; 1 of 4 elements differ)."
    )
    assert second.startswith("Usual causes: the order of a set, os.listdir() or glob (sort it); other files")
    assert second.endswith("set data_service.verify=warn.")
    assert offer(verifier, open_pass(ring, opening="other"), 0) is None


def test_the_error_names_workers_of_one_host(ring):
    """With one host, its workers are named; with one worker, what it built first and later."""
    assert str(outcome(make(), open_pass(ring), EXACT, "a", worker=1)).startswith(
        'Workers of data host A build different batches: batch["label"][1] is 3 on worker 0, but 7 on worker 1 ('
    )
    assert "3 on worker 0, but 7 on worker 0 when it was built again (" in str(
        outcome(make(), open_pass(ring), EXACT, "a")
    )


@pytest.mark.parametrize(
    ("rows", "has_indices", "text"),
    [
        ((), True, ", one of the samples with indices 0, 1;"),
        ((0, 1), True, ", samples with indices 0, 1;"),
        ((0,), False, ", sample at position 0 of the sampler's order;"),
    ],
)
def test_samples_are_named_by_what_trainers_know(ring, rows, has_indices, text):
    """By index, by position where the user's sampler yields something else, all of them where the row is unknown."""
    buffer = open_pass(ring, has_indices=has_indices)
    assert text in str(outcome(make(), buffer, EXACT._replace(rows=rows)))


def test_a_shard_without_batches_differs(ring):
    """A shard that is empty for another host ends the training, too."""
    buffer = open_pass(ring, plan=ShardSteps(2, 0, 1))
    assert (
        "batch is present on data host A, but missing, because the shard is empty, on data host B (first batch of "
        "shard 0 of train_dataloader(), epoch 0)."
    ) in str(outcome(make(), buffer, MISSING))


@pytest.mark.parametrize(("mode", "found"), [("error", INEXACT), ("warn", INEXACT), ("warn", EXACT)])
def test_what_is_only_warned_of(ring, caplog, mode, found):
    """Differences of floating-point numbers, and with ``warn`` all, give one warning for each loader; checks go on."""
    verifier = make(mode, share=1.0)
    for epoch in range(3):
        assert outcome(verifier, open_pass(ring, epoch=epoch), found) is None
    (text,) = [record.getMessage() for record in caplog.records]
    start = "Batches of train_dataloader() are not reproducible: " if found.is_inexact else "Data hosts build different"
    assert text.startswith(start)
    assert 'batch["label"][1] is 3 on data host A, but 7 on data host B' in text


def test_an_exact_difference_after_a_warning_still_ends_the_training(ring):
    """A loader whose floats differ is checked on."""
    verifier = make(share=1.0)
    assert outcome(verifier, open_pass(ring), INEXACT) is None
    assert outcome(verifier, open_pass(ring, epoch=1), EXACT) is not None
