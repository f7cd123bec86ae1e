"""A step of an interrupted job with data hosts is built again, and is what the training process saw."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_sm
from lightning_sm.__main__ import main
from lightning_sm.errors import ReplayError
from lightning_sm.rebuild.local_order import batches
from lightning_sm.rebuild.recorded_step import find_step
from lightning_sm.record.events import Event, ReplacedSample, find_files
from lightning_sm.record.runs import read_run
from tests.integration.emulators import TIMEOUT_S, local

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_augmented.py"
# Within the first of the epochs of 11 steps, and over the end of a later one.
SKIPPED = "3-5 86-90"
# Two of 90 samples.
BROKEN = "11 60"
GROUPS = ("--group", "trainer=2", "--group", "data=1")


class Ran:
    """A job that has run.

    Args:
        folder: For its data, its checkpoints, and what its ranks saw.
        kind: How the script makes its loaders.
        *options: Of the emulator.
        groups: Its instance groups.
        **variables: For the script.
    """

    def __init__(
        self, folder: Path, kind: str, *options: str, groups: Sequence[str] = GROUPS, **variables: str
    ) -> None:
        self.folder, self.kind = folder, kind
        self.data = folder / "data"
        for name in ("data", "work", "seen"):
            (folder / name).mkdir()
        np.save(self.data / "values.npy", np.arange(90.0) * 10)
        command = ["--checkpoints", str(self.record), *options, "--", *self.command]
        variables |= {"SEEN": str(folder / "seen"), "OMP_NUM_THREADS": "1"}
        ended = local(folder / "jobs", folder / "work", *groups, *command, **variables)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    @property
    def record(self) -> Path:
        """The checkpoint folder, which has the record."""
        return self.folder / "checkpoints"

    @property
    def command(self) -> list[str]:
        """The script and its arguments."""
        return [str(SCRIPT), str(self.data), self.kind]

    def seen(self) -> dict[tuple[int, int], list[tuple[int, int, Path]]]:
        """Of each rank and process: epoch, step and file of each batch that it saw, in order."""
        found: dict[tuple[int, int], list[tuple[int, int, Path]]] = {}
        for file in (self.folder / "seen").iterdir():
            epoch, _, step, rank, pid = map(int, file.stem.split("-"))
            found.setdefault((rank, pid), []).append((epoch, step, file))
        return {key: sorted(batches, key=lambda one: one[2].stat().st_mtime_ns) for key, batches in found.items()}

    def replay(self, *options: object) -> subprocess.CompletedProcess[str]:
        """Run ``lightning-sm replay``."""
        return subprocess.run(
            [sys.executable, "-m", "lightning_sm", "replay", str(self.record), *map(str, options)],
            cwd=self.folder / "work",
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A job that was interrupted, has resumed within an epoch, and leaves out steps and samples."""
    # The first attempt has half a minute of steps in which it notices the interruption.
    options = ("--fault", "interrupt@step=14")
    variables = {"EPOCHS": "10", "SLOW_FROM": "14", "SKIP_STEPS": SKIPPED, "BAD": BROKEN}
    return Ran(tmp_path_factory.mktemp("interrupted"), "plain", *options, **variables)


def resumed_at(ran: Ran, rank: int) -> tuple[int, int, Path]:
    """The first batch that a rank saw after the resume."""
    starts = [batches[0] for (number, _), batches in ran.seen().items() if number == rank]
    assert len(starts) == 2, "the job was not interrupted within its training"
    return max(starts, key=lambda one: one[1])


def is_same(one: object, other: object) -> bool:
    """Whether two batches are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def test_a_step_after_the_resume_is_rebuilt_bit_for_bit(interrupted):
    """It is what the training process saw, and what the record has the hash of."""
    epoch, step, file = resumed_at(interrupted, rank=1)
    output = interrupted.folder / "step.pt"
    ended = interrupted.replay("--step", step, "--rank", 1, "-o", output, "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout)
    assert (answer["equal"], answer["attempt"], answer["epoch"]) == (True, 2, epoch + 1)
    ((batch,),) = answer["batches"]
    assert batch["hash"] == batch["recorded_hash"]
    saved = torch.load(output)
    seen = torch.load(file)
    assert is_same(saved["batches"], [seen])
    names = [f"sample {number}" for number in seen["index"].tolist()]
    assert seen["name"] == names
    # The dataset is a Subset, whose indices are positions in it.
    assert saved["indices"] == [[batch["indices"]]]
    assert len(batch["indices"]) == len(names)


def test_steps_that_the_job_leaves_out(interrupted, capsys):
    """Nobody trains on them, the record says so, and the batches behind them are rebuilt as all others."""
    left_out = {3, 4, 5, 86, 87, 88, 89, 90}
    for rank in (0, 1):
        steps = {step for (number, _), seen in interrupted.seen().items() if number == rank for _, step, _ in seen}
        assert steps == set(range(110)) - left_out
    assert main(["verify", str(interrupted.record), "--json"]) == 0
    (loader,) = json.loads(capsys.readouterr().out)["loaders"]
    skipped = [(part["epoch"], part["steps"], part["from"], part["to"]) for part in loader["skipped"]]
    assert skipped == [(1, [3, 5], 24, 48), (8, [86, 87], 72, 88), (9, [88, 90], 0, 24)]
    ended = interrupted.replay("--step", 91, "--rank", 1, "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout)["equal"]
    ended = interrupted.replay("--step", 4)
    assert ended.returncode == 2
    assert "left out step 4 (data_service.skip_steps)" in ended.stderr
    events = [line.text for record in read_run(interrupted.record).records for line in record.lines if is_skip(line)]
    assert sorted(set(events)) == [
        "steps 3 to 5, in epoch 1 (data_service.skip_steps)",
        "steps 86 to 87, in epoch 8 (data_service.skip_steps)",
        "steps 88 to 90, in epoch 9 (data_service.skip_steps)",
    ]


def test_samples_that_could_not_be_read(interrupted, capsys):
    """Others of their batches took their places, which are rebuilt from the record, where all samples can be read."""
    broken = {int(index) for index in BROKEN.split()}
    seen = [torch.load(file) for batches in interrupted.seen().values() for _, _, file in batches]
    assert not broken & {index for batch in seen for index in batch["index"].tolist()}
    lines = [
        (record.head.rank, line)
        for record in read_run(interrupted.record).records
        for line in record.lines
        if isinstance(line, ReplacedSample)
    ]
    positions = {line.bad for _, line in lines}  # in the Subset
    assert len(positions) == len(broken)
    rank, last = max(lines, key=lambda one: (one[1].epoch, one[1].step))
    ended = interrupted.replay("--step", 11 * last.epoch + last.step, "--rank", rank, "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["equal"]
    assert answer["batches"][0][0]["indices"][last.item] == last.by
    assert main(["verify", str(interrupted.record), "--json"]) == 0
    (loader,) = json.loads(capsys.readouterr().out)["loaders"]
    assert {index for epoch in loader["replaced"] for index in epoch["indices"]} == positions


def is_skip(line: object) -> bool:
    """Whether a line of the record tells of steps that are left out."""
    return isinstance(line, Event) and line.what == "skipped_steps"


def test_the_list_of_samples_needs_neither_data_nor_script(interrupted, tmp_path):
    """From the record alone, in another folder. ``lightning_sm.replay`` returns the batch, and the same indices."""
    _, step, file = resumed_at(interrupted, rank=0)
    copy = shutil.copytree(interrupted.record, tmp_path / "record", ignore=shutil.ignore_patterns("*.ckpt"))
    listed = subprocess.run(
        [sys.executable, "-m", "lightning_sm", "replay", str(copy), "--step", str(step), "--samples", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    ((batch,),) = json.loads(listed.stdout)["batches"]
    built, indices = lightning_sm.replay(interrupted.record, step)
    assert is_same(built, torch.load(file))
    assert batch["indices"] == indices


def test_other_data_is_found(interrupted):
    """One changed value of one sample: exit code 1, both hashes, and the usual causes."""
    _, step, file = resumed_at(interrupted, rank=0)
    other = interrupted.folder / "other"
    other.mkdir()
    values = np.load(interrupted.data / "values.npy")
    values[torch.load(file)["index"][0]] += 1e-3
    np.save(other / "values.npy", values)
    ended = interrupted.replay("--step", step, "--", SCRIPT, other, "plain")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = re.search(r"DIFFERENT: its hash is ([0-9a-f]{16}), that of the run ([0-9a-f]{16})", ended.stdout)
    assert found
    assert found[1] != found[2]
    assert "NOT what the run trained on" in ended.stdout
    assert "Usual causes: other files" in ended.stdout


def test_a_changed_record_is_found(interrupted, tmp_path):
    """Another hash in the place of the right one; an error in Python."""
    _, step, _ = resumed_at(interrupted, rank=0)
    shutil.copytree(interrupted.record, tmp_path / "record", ignore=shutil.ignore_patterns("*.ckpt"))
    for file in find_files(tmp_path / "record", with_batches=True):
        if file.name.endswith("-rank-0.batches.jsonl"):
            swapped = []
            for text in file.read_text().splitlines():
                line = json.loads(text)
                for loader, packed in line.get("hashes", {}).items():
                    line["hashes"][loader] = packed.swapcase()
                swapped.append(json.dumps(line))
            file.write_text("\n".join(swapped) + "\n")
    with pytest.raises(ReplayError, match="is not what the run trained on"):
        lightning_sm.replay(tmp_path / "record", step, command=interrupted.command)


def test_a_script_without_the_fit_is_refused(interrupted):
    """The error names the fit that it should have reached."""
    _, step, _ = resumed_at(interrupted, rank=0)
    script = interrupted.folder / "nothing.py"
    script.write_text("print('no fit')\n")
    ended = interrupted.replay("--step", step, "--", script)
    assert ended.returncode == 2
    assert "The script ended before fit 1-1" in ended.stderr


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("kind", ["two", "shards", "sampler", "accumulated", "reloaded"])
def test_loaders_of_all_kinds(kind, tmp_path):
    """Several loaders, an iterable dataset, a sampler with state, accumulated gradients, loaders made again."""
    ran = Ran(tmp_path, kind)
    for (rank, _), trained in ran.seen().items():
        epoch, step, _ = trained[-1]
        files = [file for number, other, file in trained if (number, other) == (epoch, step)]
        replayed = lightning_sm.replay(ran.record, step, rank=rank, epoch=epoch + 1)
        built = replayed.batch if len(files) > 1 else [replayed.batch]
        assert is_same(built, [torch.load(file) for file in files])


def test_the_order_of_a_run_without_data_hosts(tmp_path):
    """Each index that the record tells of is the same sample in all steps of both ranks, and no other one is."""
    ran = Ran(tmp_path, "plain", groups=("--group", "trainer=2"))
    run = read_run(ran.record, with_batches=True)
    sample_of: dict[int, int] = {}
    for (rank, _), trained in ran.seen().items():
        for epoch, number, file in trained:
            step = find_step(run, number, rank=rank)
            assert step.epoch == epoch
            ((begun,), (place,)) = step.local, step.numbers
            samples = torch.load(file)["index"].tolist()
            for index, sample in zip(list(batches(begun))[place], samples, strict=True):
                assert sample_of.setdefault(index, sample) == sample
    assert len(sample_of) == len(set(sample_of.values())) == 88
