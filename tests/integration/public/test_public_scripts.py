"""Published scripts with one import changed, off SageMaker and on two trainer hosts with a data host.

Each script was written elsewhere, or modelled on one that was. None depends on these tests.
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
# Generous: a job of three hosts with torch takes 15 s on two cores.
TIMEOUT_S = 180
ONCE = ("fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu")


@dataclass(frozen=True)
class Script:
    """A script, its arguments and data, and the expected number of steps.

    Attributes:
        name: Name of the file, without suffix.
        steps: Optimizer steps of a single process; with two trainer hosts, each takes half of them.
        args: Arguments for all runs.
        data: Writes the script's data to a folder.
        folder: Name of the argument for the data folder.
        is_channel: True if a job sets that argument to its only channel, so that it can be omitted.
    """

    name: str
    steps: int
    args: tuple[str, ...] = ONCE
    data: Callable[[Path], None] | None = None
    folder: str = "--data.data_dir"
    is_channel: bool = True


CASES = {
    "image classifier": Script("image_classifier", 8, ONCE[1:]),
    "imagenet": Script("imagenet", 4, data=datasets.image_folders, folder="--model.data_path", is_channel=False),
    "bolts": Script("bolts_mnist", 8, (*ONCE, "--model.num_classes=10", "--data.batch_size=8"), datasets.mnist),
    "text": Script("text_classifier", 16),
    "time series": Script("forecasting", 8, (*ONCE, "--data.batch_size=4"), datasets.sales),
    "webdataset": Script("webdataset_images", 16, data=datasets.shards),
    "litdata": Script("litdata_tokens", 16, data=datasets.tokens),
    # Two optimizers that step once per batch. The script uses argparse and SageMakerTrainer instead of a CLI.
    "gan": Script("gan", 32, ("--max_epochs=1", "--strategy=ddp_find_unused_parameters_true")),
    "template": Script("template", 16, (*ONCE, "--test_after_fit=true", "--model.lr=0.05")),
    "graphs": Script("graph_sage", 12),
    "segmentation": Script("segmentation", 8),
    "mri": Script("accelerated_mri", 32),
}
# Scripts that print each sample with its transformed values, and check the types of their batches.
SEEN = ("graphs", "segmentation", "mri")
# Scripts whose loaders have custom iterators, so that the trainers load the batches themselves.
LOCAL = ("litdata", "webdataset, its own loader")
# Scripts whose kinds of loaders and batches are covered by tests/differential and tests/unit/data/batch.
ORDINARY = ("image classifier", "imagenet", "bolts", "time series")
# Scripts that are worth running with a data host, because no other test covers their loaders or batches.
WITH_DATA_HOST = {
    **{name: script for name, script in CASES.items() if name not in ORDINARY},
    # Each trainer host takes four steps, because with_epoch(4) counts the batches of a rank.
    "webdataset, its own loader": Script("webdataset_images", 8, (*ONCE, "--data.web_loader=true"), datasets.shards),
    "litdata, torch's loader": Script("litdata_tokens", 16, (*ONCE, "--data.stateful_loader=false"), datasets.tokens),
}


# By stage: (sample, values after transforms and random numbers), sorted.
Seen: TypeAlias = dict[str, list[tuple[Any, Any]]]


@pytest.fixture(scope="module")
def plain_runs() -> Iterator[PlainRuns]:
    """A process that runs scripts off SageMaker."""
    with started(REPOSITORY) as runs:
        yield runs


@pytest.fixture(scope="module")
def plainly_seen() -> dict[str, Seen]:
    """Samples that scripts saw off SageMaker, by case."""
    return {}


@pytest.fixture
def work(tmp_path):
    """The user's project folder."""
    folder = tmp_path / "work"
    shutil.copytree(SCRIPTS, folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Create a script's data once, and return its folder."""
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
    """Off SageMaker, the script trains for the expected number of steps."""
    script, folder = CASES[case], data(CASES[case])
    options = [] if folder is None else [f"{script.folder}={folder}"]
    code, output = plain_runs.run(work / f"{script.name}.py", [*script.args, *options], work)
    assert code == 0, output
    assert steps_in(work) == script.steps
    if case in SEEN:
        plainly_seen[case] = seen_in(output)


@pytest.mark.parametrize("case", WITH_DATA_HOST)
def test_on_two_trainers_and_a_data_host(tmp_path, plain_runs, work, data, plainly_seen, case):
    """A data host builds the script's batches, or the log says that they are loaded on the trainer hosts."""
    script = WITH_DATA_HOST[case]
    ended = run_job(tmp_path / "jobs", work, script, data(script), (*TRAINERS, *DATA_HOST))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_in(job_dir(tmp_path / "jobs")) == script.steps // 2
    assert ("its batches are loaded here" in ended.stdout) == (case in LOCAL)
    if case in SEEN:
        if case not in plainly_seen:
            test_plainly(plain_runs, work, data, plainly_seen, case)
        seen = seen_in(ended.stdout)
        # Training samples are augmented with other random numbers than in a local DataLoader: compare the samples only.
        assert samples(seen["train"]) == samples(plainly_seen[case]["train"]), ended.stdout
        assert seen["val"] == plainly_seen[case]["val"], ended.stdout


def test_template_continues_after_an_interruption(tmp_path, work):
    """A CLI with a custom ``_prepare_subcommand_kwargs`` resumes after an interruption and continues its log."""
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
    """Emulate a job whose only channel has the script's data."""
    channel = [] if folder is None else ["--channel", f"training={folder}"]
    args = [] if folder is None or script.is_channel else [f"{script.folder}={folder}"]
    options = [*groups, *channel, *options, "--env", f"PYTHONPATH={python_path(REPOSITORY)}"]
    return local(jobs, work, *options, "--", f"{script.name}.py", *script.args, *args, timeout_s=TIMEOUT_S)


def seen_in(output):
    """Collect the samples that all ranks printed, by stage."""
    runs = [ast.literal_eval(text) for text in re.findall(r"seen (\{.*\})", output)]
    assert runs, output
    return {stage: sorted((seen for run in runs for seen in run[stage]), key=repr) for stage in ("train", "val")}


def samples(seen):
    """Return the samples without their values, sorted."""
    return sorted((sample for sample, _ in seen), key=repr)


def steps_in(folder):
    """Return the highest global step among the checkpoints in a folder."""
    files = [file for file in folder.rglob("*.ckpt") if not file.is_symlink()]
    return max(torch.load(file, weights_only=False)["global_step"] for file in files)
