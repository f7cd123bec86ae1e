"""Scripts as they are published, with one import changed: plainly, and on two trainers with a data host.

Each was written elsewhere, or in the shape of what is; none knows of these tests.
"""

from __future__ import annotations

import ast
import csv
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.integration.emulators import job_dir, local
from tests.integration.hosts import REPOSITORY
from tests.integration.public import datasets
from tests.integration.public.plain_runs import PlainRuns, started
from tests.quick_processes import python_path

pytestmark = [pytest.mark.processes, pytest.mark.proof]

SCRIPTS = Path(__file__).parent / "scripts"
TRAINERS = ("--group", "trainer=2")
DATA_HOST = ("--group", "data=1")
# A job of three hosts with torch takes 15 s on two cores.
TIMEOUT_S = 180
ONCE = ("fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu")


@dataclass(frozen=True)
class Script:
    """One script, and what is to become of it.

    Attributes:
        name: Its file.
        steps: Optimizer steps of one process; two trainers take half of them each.
        args: Its arguments everywhere.
        data: Makes its data.
        folder: The argument for the folder of the data.
        is_channel: Whether a job sets it to its only channel, so that it need not be given.
    """

    name: str
    steps: int
    args: tuple[str, ...] = ONCE
    data: Callable[[Path], None] | None = None
    folder: str = "--data.data_dir"
    is_channel: bool = True


CASES = {
    "image classifier": Script("image_classifier", 8, ONCE[1:]),
    "imagenet": Script(
        "imagenet",
        4,
        data=datasets.image_folders,
        folder="--model.data_path",
        is_channel=False,
    ),
    "bolts": Script("bolts_mnist", 8, (*ONCE, "--model.num_classes=10", "--data.batch_size=8"), datasets.mnist),
    "text": Script("text_classifier", 16),
    "time series": Script("forecasting", 8, (*ONCE, "--data.batch_size=4"), datasets.sales),
    "webdataset": Script("webdataset_images", 16, data=datasets.shards),
    "litdata": Script(
        "litdata_tokens",
        16,
        data=datasets.tokens,
    ),
    # Two optimizers, each of which steps once for a batch. No CLI: argparse, and SageMakerTrainer in place of Trainer.
    "gan": Script("gan", 32, ("--max_epochs=1", "--strategy=ddp_find_unused_parameters_true")),
    "template": Script("template", 16, (*ONCE, "--test_after_fit=true", "--model.lr=0.05")),
    "graphs": Script("graph_sage", 12),
    "segmentation": Script("segmentation", 8),
    "mri": Script("accelerated_mri", 32),
}
# They print the samples of a run, each with what became of it, and check the types of their batches.
SEEN = ("graphs", "segmentation", "mri")
# Those with loaders that have iterators of their own.
LOCAL = ("litdata", "webdataset, its own loader")
# Their loaders and batches are of kinds that tests/differential and tests/unit/data/batch have.
ORDINARY = ("image classifier", "imagenet", "bolts", "time series")
# What only data hosts take differently.
WITH_DATA_HOST = {
    **{name: script for name, script in CASES.items() if name not in ORDINARY},
    # Each trainer takes four steps: with_epoch(4) counts batches of a rank.
    "webdataset, its own loader": Script(
        "webdataset_images",
        8,
        (*ONCE, "--data.web_loader=true"),
        datasets.shards,
    ),
    "litdata, torch's loader": Script("litdata_tokens", 16, (*ONCE, "--data.stateful_loader=false"), datasets.tokens),
}


# By stage: each sample, and what transforms and random numbers made of it, in an order of their own.
Seen: TypeAlias = dict[str, list[tuple[Any, Any]]]


@pytest.fixture(scope="module")
def plain_runs() -> Iterator[PlainRuns]:
    """Runs scripts off SageMaker."""
    with started(REPOSITORY) as runs:
        yield runs


@pytest.fixture(scope="module")
def plainly_seen() -> dict[str, Seen]:
    """The samples that scripts saw off SageMaker."""
    return {}


@pytest.fixture
def work(tmp_path):
    """The user's project folder."""
    folder = tmp_path / "work"
    shutil.copytree(SCRIPTS, folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of a script's data, made once."""
    made: dict[str, Path] = {}

    def folder_of(script: Script) -> Path | None:
        if script.data is None:
            return None
        if script.name not in made:
            made[script.name] = tmp_path_factory.mktemp(script.name)
            script.data(made[script.name])
        return made[script.name]

    return folder_of


@pytest.mark.parametrize("case", CASES)
def test_plainly(plain_runs, work, data, plainly_seen, case):
    """Off SageMaker the script trains as with LightningCLI."""
    script, folder = CASES[case], data(CASES[case])
    options = [] if folder is None else [f"{script.folder}={folder}"]
    code, output = plain_runs.run(work / f"{script.name}.py", [*script.args, *options], work)
    assert code == 0, output
    assert steps_in(work) == script.steps
    if case in SEEN:
        plainly_seen[case] = seen_in(output)


@pytest.mark.parametrize("case", WITH_DATA_HOST)
def test_on_two_trainers_and_a_data_host(tmp_path, plain_runs, work, data, plainly_seen, case):
    """A data host builds the batches of the same script, or a line says which loader stays on the trainers."""
    script = WITH_DATA_HOST[case]
    ended = run_job(tmp_path / "jobs", work, script, data(script), (*TRAINERS, *DATA_HOST))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_in(job_dir(tmp_path / "jobs")) == script.steps // 2
    assert ("its batches are loaded here" in ended.stdout) == (case in LOCAL)
    if case in SEEN:
        if case not in plainly_seen:
            test_plainly(plain_runs, work, data, plainly_seen, case)
        seen = seen_in(ended.stdout)
        # Random numbers, and so what training samples become, are not those of a local DataLoader.
        assert samples(seen["train"]) == samples(plainly_seen[case]["train"]), ended.stdout
        assert seen["val"] == plainly_seen[case]["val"], ended.stdout


def test_template_continues_after_an_interruption(tmp_path, work):
    """A CLI that prepares the arguments of fit itself resumes all the same, and logs from there on."""
    args = (*ONCE, "--data.num_samples=6000", "--trainer.log_every_n_steps=10", "--trainer.limit_val_batches=1")
    long = Script("template", 1500, args)
    ended = run_job(tmp_path / "jobs", work, long, None, TRAINERS, "--fault", "interrupt@step=100")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Resuming from" in ended.stdout
    first, second = (
        [int(row["step"]) for row in csv.DictReader(path.read_text().splitlines())]
        for path in sorted(job_dir(tmp_path / "jobs").glob("checkpoints/logs/blobs/*/metrics.csv"))
    )
    assert first + second == sorted(first + second)
    assert first[0] < 100 <= first[-1] < second[0]
    assert steps_in(job_dir(tmp_path / "jobs")) == long.steps // 2


def run_job(jobs, work, script, folder, groups, *options):
    """Emulate a job; the script finds its data in the job's only channel."""
    channel = [] if folder is None else ["--channel", f"training={folder}"]
    args = [] if folder is None or script.is_channel else [f"{script.folder}={folder}"]
    options = [*groups, *channel, *options, "--env", f"PYTHONPATH={python_path(REPOSITORY)}"]
    return local(jobs, work, *options, "--", f"{script.name}.py", *script.args, *args, timeout_s=TIMEOUT_S)


def seen_in(output):
    """What the ranks of a script saw in each stage."""
    runs = [ast.literal_eval(text) for text in re.findall(r"seen (\{.*\})", output)]
    assert runs, output
    return {stage: sorted((seen for run in runs for seen in run[stage]), key=repr) for stage in ("train", "val")}


def samples(seen):
    """The samples alone."""
    return sorted((sample for sample, _ in seen), key=repr)


def steps_in(folder):
    """The most steps that a checkpoint in a folder has."""
    files = [file for file in folder.rglob("*.ckpt") if not file.is_symlink()]
    return max(torch.load(file, weights_only=False)["global_step"] for file in files)
