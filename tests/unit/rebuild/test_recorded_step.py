"""Which batches a step had, told from the records of runs that never happened."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec import structs
from torch.utils.data import DistributedSampler

from lightning_sm.__main__ import main
from lightning_sm.data.plan.order import ShuffledOrder
from lightning_sm.errors import ReplayError
from lightning_sm.rebuild.local_order import batches
from lightning_sm.rebuild.recorded_step import find_step
from lightning_sm.record.batch_log import BatchLog, pack, unpack
from lightning_sm.record.events import LocalPass, Recorder, ReplacedSample, TrainedBatches, TrainingPass, batches_path
from lightning_sm.record.runs import read_run
from tests.unit.report.recorded import PASS, head, write


def process(folder, *trained, t=0.0, attempt=1, rank=0, passes=(PASS,)):
    """Write the record of a rank, with what it trained on: arguments of ``BatchLog.note`` without the fit."""
    first = head(t, who=f"rank-{rank}", attempt=attempt)
    file = write(folder, first, *(structs.replace(one, rank=rank) for one in passes), who=first.who, attempt=attempt)
    recorder = Recorder(batches_path(file))
    recorder.append(first)
    log = BatchLog(recorder.append)
    for batch in trained:
        log.note("1-1", *batch)
    log.flush()
    recorder.close()


def find(folder, step, **options):
    """Find a step."""
    return find_step(read_run(folder, with_batches=True), step, **options)


def test_hashes_are_kept_as_text():
    """Whatever the numbers, also where none is."""
    hashes = [0, 1, 2**64 - 1, 0x0123456789ABCDEF]
    assert unpack(pack(hashes)) == hashes
    assert unpack(pack([])) == []
    with pytest.raises(ValueError, match="are no 64-bit numbers"):
        unpack("AAAA")


def test_a_line_has_consecutive_batches():
    """A new one begins with another epoch, behind a gap, and where another loader has ended."""
    lines = []
    log = BatchLog(lines.append)
    both = [(0, 7, None), (1, 8, None)]
    for epoch, number, origins in [(0, 0, both), (0, 1, both), (0, 2, both[:1]), (1, 0, both), (1, 2, both)]:
        log.note("1-1", epoch, number, 10 * epoch + number, origins)
    log.flush()
    log.flush()
    assert [(line.epoch, line.first, line.num, sorted(line.hashes)) for line in lines] == [
        (0, 0, 2, ["0", "1"]),
        (0, 2, 1, ["0"]),
        (1, 0, 1, ["0", "1"]),
        (1, 2, 1, ["0", "1"]),
    ]
    assert all(unpack(line.hashes["0"]) == [7] * line.num for line in lines)
    assert [(line.step, line.steps) for line in lines] == [(0, []), (2, []), (10, []), (12, [])]


def test_a_long_run_is_written_in_parts():
    """What is kept in memory has a limit, and nothing is lost at it."""
    lines = []
    log = BatchLog(lines.append)
    for number in range(10_000):
        log.note("1-1", 0, number, number // 4)
    log.flush()
    steps = [step for line in lines for step in line.steps]
    assert len(lines) > 1
    assert steps == [number // 4 for number in range(10_000)]


def test_the_readers_of_time_do_without_batches(tmp_path):
    """``read_run`` reads them only on request."""
    process(tmp_path, (0, 0, 0, [(0, 7, None)]))
    kinds = [{type(line) for line in record.lines} for record in read_run(tmp_path).records]
    assert kinds == [{TrainingPass}]
    records = read_run(tmp_path, with_batches=True).records
    assert sorted(type(line).__name__ for record in records for line in record.lines) == [
        TrainedBatches.__name__,
        TrainingPass.__name__,
    ]


def test_the_last_attempt_counts(tmp_path):
    """A step that was undone and trained again is that of the later start; another one can be named."""
    process(tmp_path, *((0, number, number, [(0, 10 + number, None)]) for number in range(3)))
    later = structs.replace(PASS, first_step=1)
    process(tmp_path, *((0, number, number, [(0, 10 + number, None)]) for number in (1, 2)), attempt=2, passes=[later])
    step = find(tmp_path, 2)
    assert (step.attempt, step.epoch, step.numbers) == (2, 0, [2])
    ((batch,),) = step.batches
    assert (batch.number, batch.content_hash, batch.begun.first_step) == (2, 12, 1)
    assert "2 starts of the job trained on step 2" in step.notes[0]
    assert find(tmp_path, 2, attempt=1).attempt == 1
    assert (find(tmp_path, 0).attempt, find(tmp_path, 0).notes) == (1, [])


def test_a_step_that_a_later_attempt_leaves_out(tmp_path):
    """It is that of the attempt that trained on it, and a note says that the model lacks it. Others are unchanged."""
    batches = [(0, number, number, [(0, 10 + number, None)]) for number in range(3)]
    process(tmp_path, *batches)
    left_out = structs.replace(PASS, first_step=1, num_skipped=1, skipped_steps=[1, 1])
    behind = structs.replace(PASS, first_step=2)
    process(tmp_path, batches[0], batches[2], t=1.0, attempt=2, passes=[PASS, left_out, behind])
    step = find(tmp_path, 1)
    assert (step.attempt, step.notes) == (
        1,
        ["Attempt 2 left out step 1 (data_service.skip_steps), so it is not in the model."],
    )
    ((batch,),) = find(tmp_path, 2).batches
    assert (find(tmp_path, 2).attempt, batch.number, batch.begun.first_step) == (2, 2, 2)
    with pytest.raises(
        ReplayError, match=r"Attempt 2 of .* left out step 1 \(data_service.skip_steps\), and the record"
    ):
        find(tmp_path, 1, attempt=2)


def test_a_replaced_sample_is_listed_by_the_index_that_was_read(tmp_path, capsys):
    """Of several lines for a sample, the last one counts; those of other batches and loaders do not."""
    order = ShuffledOrder(20, seed=5, epoch=0, salt="train 0")
    lines = [
        ReplacedSample(0.0, "1-1", "train_dataloader()", loader, epoch, 0, step, item, bad, by)
        for loader, epoch, step, item, bad, by in [
            *((0, 0, 1, 2, 50, 51), (0, 0, 1, 2, 51, 52), (0, 0, 0, 1, 60, 61)),
            *((0, 1, 1, 1, 70, 71), (1, 0, 1, 1, 80, 81)),
        ]
    ]
    process(tmp_path, *((0, number, number, [(0, number, None)]) for number in range(3)), passes=[PASS])
    write(tmp_path, *lines)
    assert main(["replay", str(tmp_path), "--step", "1", "--samples", "--json"]) == 0
    ((batch,),) = json.loads(capsys.readouterr().out)["batches"]
    own = order[np.arange(8, 12)].tolist()
    assert batch["indices"] == [*own[:2], 52, own[3]]


def test_a_step_has_all_batches_whose_gradients_it_accumulated(tmp_path):
    """Also where the accumulation ends with the epoch."""
    process(tmp_path, *((0, number, number // 2, [(0, number, None)]) for number in range(3)))
    assert find(tmp_path, 0).numbers == [0, 1]
    assert find(tmp_path, 1).numbers == [2]


def test_a_loader_that_starts_again_within_the_epoch(tmp_path):
    """CombinedLoader cycles: the Trainer counts on, and the batch is from the second pass."""
    second = structs.replace(PASS, pass_index=1)
    process(tmp_path, *((0, number, number, [(0, number, None)]) for number in range(5)), passes=[PASS, second])
    ((batch,),) = find(tmp_path, 4).batches
    assert (batch.begun.pass_index, batch.number) == (1, 1)


def test_a_padded_last_step_is_a_pass_of_its_own(tmp_path):
    """The pass that was begun last before a batch says how it was made."""
    held = structs.replace(PASS, first_step=2, tail="pad")
    process(tmp_path, *((0, number, number, [(0, number, None)]) for number in range(3)), passes=[PASS, held])
    tails = [find(tmp_path, step).batches[0][0].begun.tail for step in range(3)]
    assert tails == ["exact", "exact", "pad"]


def test_a_batch_of_a_shard_knows_its_place(tmp_path):
    """Index of the pass over the shards, shard, and number in the shard."""
    shards = structs.replace(PASS, order="shards", num_steps=None, num_samples=None, num_shards=16)
    process(tmp_path, (0, 0, 0, [(0, 1, (0, 3, 0))]), (0, 1, 1, [(0, 2, (1 << 32, 5, 2))]), passes=[shards])
    ((batch,),) = find(tmp_path, 1).batches
    assert (batch.shard, batch.shard_pass, batch.content_hash) == ((5, 2), 1 << 32, 2)


def test_samples_are_those_of_the_order(tmp_path, capsys):
    """Each rank has its part of the step, from the position that its order has."""
    order = ShuffledOrder(20, seed=5, epoch=0, salt="train 0")
    for rank in (0, 1):
        process(tmp_path, *((0, number, number, [(0, number, None)]) for number in range(3)), rank=rank)
        for step, (start, stop) in {1: (8 + 4 * rank, 12 + 4 * rank), 2: (16 + 2 * rank, 18 + 2 * rank)}.items():
            assert main(["replay", str(tmp_path), "--step", str(step), "--rank", str(rank), "--samples", "--json"]) == 0
            ((batch,),) = json.loads(capsys.readouterr().out)["batches"]
            assert (batch["position"], batch["indices"]) == (start, order[np.arange(start, stop)].tolist())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step": 3}, "attempt 1 has steps 0 to 2"),
        ({"step": 1, "rank": 4}, "has no record of rank 4, only of: 0"),
        ({"step": 1, "attempt": 2}, "no step 1 of rank 0"),
        ({"step": 1, "epoch": 3}, "no step 1 of rank 0"),
        ({"step": 1, "fit": "2-1"}, "no step 1 of rank 0"),
    ],
)
def test_what_is_missing_is_said(tmp_path, options, says):
    """The error names what the record has."""
    process(tmp_path, *((0, number, number, [(0, number, None)]) for number in range(3)))
    with pytest.raises(ReplayError, match=says):
        find(tmp_path, **options)


def test_a_record_without_the_start_of_the_pass_is_incomplete(tmp_path):
    """The batch alone does not say how its samples were chosen."""
    process(tmp_path, (0, 0, 0, [(0, 7, None)]), passes=[structs.replace(PASS, epoch=1)])
    with pytest.raises(ReplayError, match="not the start of the pass over training loader 0"):
        find(tmp_path, 0)


def test_a_record_without_batches_says_so(tmp_path):
    """That of an earlier version, or of which only a part was collected."""
    write(tmp_path, head(), PASS)
    with pytest.raises(ReplayError, match="does not say which batches rank 0 trained on"):
        find(tmp_path, 0)


def local(**known):
    """A pass without data hosts."""
    return LocalPass(0.0, "1-1", 0, 0, "DistributedSampler", **known)


def run_locally(folder, *passes):
    """Write the record of a run without data hosts, of three steps."""
    process(folder, *((0, number, number) for number in range(3)), passes=[])
    for one in passes:
        write(folder, one)


def test_a_local_order_of_torch_is_known(tmp_path, capsys):
    """That of DistributedSampler, with its seed, in the epoch and on the rank of the step."""
    arguments = {"num_replicas": 2, "rank": 1, "shuffle": True, "seed": 7, "drop_last": False}
    known = {"is_known": True, "num_samples": 11, "batch_size": 2}
    run_locally(tmp_path, local(**known, distributed={**arguments, "epoch": 3}))
    assert main(["replay", str(tmp_path), "--step", "2", "--samples", "--json"]) == 0
    ((batch,),) = json.loads(capsys.readouterr().out)["batches"]
    sampler = DistributedSampler(range(11), **arguments)
    sampler.set_epoch(3)
    assert batch["indices"] == list(sampler)[4:6]


def test_a_sequential_order_is_known():
    """A loader without shuffle."""
    begun = local(is_known=True, num_samples=5, batch_size=2)
    assert list(batches(begun)) == [[0, 1], [2, 3], [4]]
    assert list(batches(structs.replace(begun, drop_last=True))) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("passes", "says"),
    [([], "it has no loader"), ([local()], "it has the order of a DistributedSampler, which no seed")],
)
def test_other_local_orders_are_not_known(tmp_path, caplog, passes, says):
    """Epoch and batch are; and nothing can be compared where there is no hash."""
    run_locally(tmp_path, *passes)
    step = find(tmp_path, 2)
    assert (step.numbers, step.batches) == ([2], [[]])
    assert main(["replay", str(tmp_path), "--step", "2", "--samples"]) == 2
    assert says in caplog.text
    assert main(["replay", str(tmp_path), "--step", "2"]) == 2
    assert "no data hosts built them" in caplog.text


def test_two_fits_with_the_same_step_are_told_apart(tmp_path):
    """The error names both; --fit chooses one."""
    process(tmp_path, (0, 0, 0, [(0, 7, None)]))
    file = next(tmp_path.rglob("*.batches.jsonl"))
    file.write_text(file.read_text() + file.read_text().splitlines()[-1].replace('"1-1"', '"2-1"') + "\n")
    with pytest.raises(ReplayError, match="in 2 fits of the script: 1-1, 2-1"):
        find(tmp_path, 0)
    assert find(tmp_path, 0, fit="1-1").fit == "1-1"


def test_a_sampler_needs_the_script(tmp_path, caplog):
    """Of its order the record has only the digest."""
    sampler = structs.replace(PASS, order="sampler", digest="abc")
    process(tmp_path, (0, 0, 0, [(0, 7, None)]), passes=[sampler])
    assert main(["replay", str(tmp_path), "--step", "0", "--samples"]) == 2
    assert "only the digest (abc)" in caplog.text
