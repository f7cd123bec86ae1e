"""Whether each sample was trained on exactly once, told from records that lose, repeat and reorder samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_sm.__main__ import main
from lightning_sm.data.plan.order import ShuffledOrder
from lightning_sm.record.events import End, FileHead, Reached, ReplacedSample, TrainingPass, to_json
from tests.unit.report.recorded import PASS


def begun(epoch=0, first_step=0, **changed):
    """The start of a pass."""
    return replace(PASS, epoch=epoch, first_step=first_step, **changed)


def reached(epoch, num_batches):
    """How far a rank came."""
    return Reached(0.0, "1-1", epoch, num_batches)


class Written:
    """A record, as the ranks of a job write it."""

    def __init__(self, folder):
        self.folder = folder / "lightning-sm-record"
        self.time = 0.0

    def process(self, *lines, attempt=1, ranks=(0, 1), ends=True):
        """Let the ranks of a start write these lines, and their end unless they are killed."""
        self.time += 1
        end = [End(0.0, "succeeded")] if ends else []
        for rank in ranks:
            head = FileHead(self.time, f"algo-{rank + 1}", f"rank-{rank}", "job", attempt, rank=rank, world_size=2)
            own = [replace(one, rank=rank) if isinstance(one, TrainingPass) else one for one in lines]
            file = self.folder / str(attempt) / f"{head.host}-{head.who}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.writelines(f"{to_json(line)}\n" for line in (head, *own, *end))

    def epochs(self, *numbers):
        """The lines of whole epochs."""
        return [line for epoch in numbers for line in (begun(epoch), reached(epoch, 3))]


@pytest.fixture
def written(tmp_path):
    """An empty record."""
    return Written(tmp_path)


@pytest.fixture
def verify(tmp_path, capfd):
    """Runs ``lightning-sm verify`` on the record; returns exit code and output."""

    def run(*options):
        code = main(["verify", str(tmp_path), *options])
        return code, capfd.readouterr().out

    return run


def test_a_run_without_interruptions(written, verify):
    """Each epoch once, each to its end."""
    written.process(*written.epochs(0, 1))
    code, text = verify()
    assert code == 0
    assert text == (
        "job: train_dataloader(), Digits of 20: each sample was trained on exactly once in 2 complete epochs (1 start "
        "of rank 0).\n"
    )


def test_an_interruption_a_restart_and_other_ranks(written, verify):
    """What was trained on after the state that was resumed from counts once, and less ranks read larger parts."""
    written.process(begun(), reached(0, 2))
    written.process(begun(0, 1), reached(0, 3), begun(1), reached(1, 2), attempt=2, ends=False)
    # One rank with twice the batch: its second step begins where the second of two ranks did.
    alone = {"world_size": 1, "batch_size": 8}
    written.process(begun(1, 1, **alone), reached(1, 3), attempt=3, ranks=(0,))
    code, text = verify("--json")
    (loader,) = json.loads(text)["loaders"]
    assert (code, loader["problems"], loader["complete_epochs"]) == (0, [], [1, 2])
    assert [(part["epoch"], part["attempt"], part["from"], part["to"]) for part in loader["trained"]] == [
        (1, 1, 0, 8),
        (1, 2, 8, 20),
        (2, 2, 0, 8),
        (2, 3, 8, 20),
    ]
    assert loader["undone"] == 16


def skipped(epoch, first_step, num, step, **changed):
    """Batches of steps that a run leaves out."""
    return begun(epoch, first_step, num_skipped=num, skipped_steps=[step, step + num - 1], **changed)


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "killed"])
def test_a_run_that_leaves_out_steps(written, verify, ends):
    """What it leaves out is named by steps, positions and indices, and is neither lost nor done again."""
    written.process(begun(), reached(0, 1), skipped(0, 1, 2, 1), skipped(1, 0, 1, 3), begun(1, 1), ends=ends)
    written.process(begun(1, 1), reached(1, 3), attempt=2)
    code, text = verify()
    assert code == 0
    assert "in 2 complete epochs, except for 20 samples that data_service.skip_steps leaves out (2 starts" in text
    assert (
        f"  note: Epoch 1: left out by data_service.skip_steps: 12 samples at positions 8 to 19 of the order (indices "
        f"{indices(0, 8, 13)}, ...), in steps 1 to 2 of attempt 1.\n"
    ) in text
    assert "  note: Epoch 2: left out by data_service.skip_steps: 8 samples at positions 0 to 7" in text
    (loader,) = json.loads(verify("--json")[1])["loaders"]
    trained = [(part["epoch"], part["from"], part["to"]) for part in loader["trained"]]
    assert trained == [(1, 0, 8), (2, 8, 20)]
    assert loader["skipped"] == [
        {"epoch": 1, "attempt": 1, "steps": [1, 2], "from": 8, "to": 20},
        {"epoch": 2, "attempt": 1, "steps": [3, 3], "from": 0, "to": 8},
    ]


def test_a_later_start_leaves_out_what_an_earlier_one_trained_on(written, verify):
    """As behind a spike: the samples of the first start are undone, and count as left out."""
    written.process(begun(), reached(0, 3))
    written.process(skipped(0, 1, 1, 1), begun(0, 2), reached(0, 3), attempt=2)
    code, text = verify()
    assert code == 0
    assert "except for 8 samples that data_service.skip_steps leaves out (2 starts of rank 0, 12 of its" in text


def test_what_is_lost_beside_steps_that_are_left_out(written, verify):
    """A start that goes on behind more than it leaves out has lost the rest."""
    written.process(begun(), reached(0, 1), skipped(0, 1, 1, 1))
    written.process(begun(0, 2), reached(0, 3), begun(1, 1), reached(1, 3), attempt=2)
    code, text = verify()
    assert code == 1
    assert "problem: Epoch 2: never trained on: 8 samples at positions 0 to 7" in text
    assert "note: Epoch 1: left out by data_service.skip_steps: 8 samples at positions 8 to 15" in text


def test_ranks_that_leave_out_different_steps(written, verify):
    """One rank has trained on what the others left out."""
    written.process(begun(), reached(0, 1), skipped(0, 1, 1, 1), begun(0, 2), reached(0, 3), ranks=(0,))
    written.process(begun(), reached(0, 3), ranks=(1,))
    code, text = verify()
    assert code == 1
    assert "attempt 1 has no record of rank 1 from batch 1 on, where rank 0 has one" in text


def replaced(epoch, step, item, bad, by):
    """A sample that could not be read."""
    return ReplacedSample(0.0, "1-1", "train_dataloader()", 0, epoch, 0, step, item, bad, by, "OSError: no file")


def test_samples_that_could_not_be_read(written, verify):
    """They are named by their own indices, for what is in the model, and are not lost: others took their places."""
    written.process(begun(), replaced(0, 0, 1, 7, 8), replaced(0, 1, 0, 3, 4), reached(0, 2), ranks=(0,), ends=False)
    # The second start resumes before step 1, whose sample is bad again; so is the first one that was to replace it.
    own = [begun(0, 1), replaced(0, 1, 0, 3, 4), replaced(0, 1, 0, 4, 5), reached(0, 3)]
    written.process(*own, begun(1), replaced(1, 2, 1, 7, 2), reached(1, 3), attempt=2, ranks=(0,))
    for file in list(written.folder.glob("*/algo-1-rank-0.jsonl")):
        text = file.read_text().replace("algo-1", "algo-2").replace("rank-0", "rank-1").replace('"rank":0', '"rank":1')
        lines = [line for line in text.splitlines(keepends=True) if '"kind":"replaced"' not in line]
        file.with_name("algo-2-rank-1.jsonl").write_text("".join(lines))
    code, text = verify()
    assert code == 0
    assert "in 2 complete epochs, except for 3 samples that data_service.max_bad_samples replaces (2 starts" in text
    assert "note: Epoch 1: 2 samples could not be read, and others of the batch took the place" in text
    assert "(data_service.max_bad_samples): indices 7, 3.\n" in text
    (loader,) = json.loads(verify("--json")[1])["loaders"]
    assert loader["replaced"] == [{"epoch": 1, "indices": [7, 3]}, {"epoch": 2, "indices": [7]}]


def indices(epoch, start, stop):
    """The samples at some positions of a shuffled epoch, as text."""
    return ", ".join(map(str, ShuffledOrder(20, seed=5, epoch=epoch, salt="train 0")[np.arange(start, stop)]))


@pytest.mark.parametrize(
    ("processes", "says"),
    [
        (
            [[begun(), reached(0, 1)], [begun(0, 2), reached(0, 3)]],
            f"Epoch 1: never trained on: 8 samples at positions 8 to 15 of the order (indices {indices(0, 8, 13)}, "
            "...); attempt 2 resumes behind them.",
        ),
        (
            [[begun(), reached(0, 2), begun(1), reached(1, 3)]],
            f"Epoch 1: never trained on: 4 samples at positions 16 to 19 of the order (indices {indices(0, 16, 20)}); "
            "epoch 2 begins without them.",
        ),
        (
            [[begun(), reached(0, 3)], [begun(2), reached(2, 3)]],
            "Epoch 2 was not trained on: epoch 3 follows epoch 1.",
        ),
        (
            [[begun(0, 1), reached(0, 3)]],
            "The record begins in epoch 1, before the sample at position 8 of the order",
        ),
        (
            [[begun(), reached(0, 1)], [begun(0, 1, seed=6), reached(0, 3)]],
            "Epoch 1 was read in two orders: seed 5 in attempt 1 and 6 in attempt 2.",
        ),
        (
            [[begun(), reached(0, 1)], [begun(0, 1, data="d2"), reached(0, 3)]],
            "data 'd1' in attempt 1 and 'd2' in attempt 2",
        ),
        (
            [[begun(), reached(0, 2)], [begun(0, 1, batch_size=5, num_repeated=6, num_steps=2), reached(0, 2)]],
            "Epoch 1: trained on twice: 6 samples at positions 10 to 15 of the order",
        ),
    ],
    ids=[
        "lost by a resume",
        "an epoch cut short",
        "an epoch left out",
        "no beginning",
        "reordered",
        "data",
        "repeated",
    ],
)
def test_a_run_that_loses_repeats_or_reorders(written, verify, processes, says):
    """The first samples concerned are named, with epoch and attempt, and the exit code is 1."""
    for attempt, lines in enumerate(processes, start=1):
        written.process(*lines, attempt=attempt)
    code, text = verify()
    assert code == 1
    assert "NOT verified, 1 problem." in text
    assert says in text


def test_a_killed_process_may_have_trained_on_more_than_it_wrote(written, verify):
    """The state that the next one resumed from shows it; the verdict says how much rests on that."""
    written.process(begun(), reached(0, 1), ends=False)
    written.process(begun(0, 2), reached(0, 3), attempt=2)
    code, text = verify()
    assert code == 0
    assert "note: Epoch 1: a process of attempt 1 was killed before it wrote how far it came." in text
    assert "shows that it was trained on 8 samples at positions 8 to 15" in text


@pytest.mark.parametrize("before", [(), (reached(0, 1),)], ids=["nothing", "a part"])
def test_an_uneven_last_step_is_a_pass_of_its_own(written, verify, before):
    """It begins while the step before runs, whether or not the record has said until then how far the first came."""
    last = begun(0, 2, tail="exact")
    written.process(
        begun(tail="hold"), *before, last, reached(0, 2), reached(0, 3), begun(1, tail="exact"), reached(1, 3)
    )
    code, text = verify()
    assert code == 0, text
    assert "exactly once in 2 complete epochs (1 start of rank 0)." in text


def test_a_process_that_was_killed_in_its_last_step(written, verify):
    """How far it came before the last step was not written either; the state that is resumed from shows it."""
    written.process(begun(tail="hold"), reached(0, 1), begun(0, 2, tail="exact"), ends=False)
    written.process(begun(0, 2), reached(0, 3), attempt=2)
    code, text = verify()
    assert code == 0, text
    assert "shows that it was trained on 8 samples at positions 8 to 15" in text


def test_a_process_that_goes_on_behind_what_it_has_trained_on(written, verify):
    """Batches that it has not counted were not trained on."""
    written.process(begun(), reached(0, 1), begun(0, 2), begun(1), reached(1, 3))
    code, text = verify()
    assert code == 1
    assert "Epoch 1: never trained on: 8 samples at positions 8 to 15" in text


def test_a_rank_of_which_there_is_no_record(written, verify):
    """Nothing says that it read its part."""
    written.process(*written.epochs(0), ranks=(0,))
    code, text = verify()
    assert code == 1
    assert "Epoch 1: attempt 1 has no record of rank 1 from batch 0 on" in text


def test_a_rank_that_left_early(written, verify):
    """Rank 0 alone does not speak for the others."""
    written.process(begun(), reached(0, 3), ranks=(0,))
    written.time -= 1
    written.process(begun(), reached(0, 2), ranks=(1,))
    code, text = verify()
    assert code == 1
    assert "rank 1 of attempt 1 ended after batch 2" in text


def test_a_run_without_data_hosts(written, verify):
    """The record does not say which samples a local loader read: that is not verified."""
    written.process()
    code, text = verify()
    assert code == 1
    assert "no data hosts served its training loaders" in text


def test_what_is_left_out_or_repeated_on_purpose(written, verify):
    """drop_last and the Trainer's limits are no problems, and are said."""
    for fit, changed in (
        ("1-1", {"drop_last": True, "num_steps": 2}),
        ("2-1", {"stop_step": 1}),
        ("3-1", {"num_samples": 17}),
    ):
        steps = 1 if "stop_step" in changed else changed.get("num_steps", 3)
        written.process(begun(fit=fit, **changed), Reached(0.0, fit, 0, steps))
    code, text = verify()
    assert code == 0
    assert "drop_last leaves out 4 samples per epoch." in text
    assert "The Trainer's limits end epochs at position 8 of 20." in text
    assert "The last step of an epoch repeats 1 sample to give each rank its part." in text
