"""strategy=pipeline in jobs: with data hosts, interruption, resume and export, and under torchrun."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.emulators import job_dir, local
from tests.integration.hosts import REPOSITORY, Hosts
from tests.integration.rank_launchers import torchrun

# make test covers the strategy with test_pipeline.py, and interruptions with training/test_interruptions.py.
pytestmark = [pytest.mark.processes, pytest.mark.proof]

TEXT = str(REPOSITORY / "app/train_text.py")
CONFIG = str(REPOSITORY / "app/configs/transformer.yaml")
HYBRID = str(REPOSITORY / "app/configs/hybrid.yaml")
# Plain SGD, because AdamW turns gradients that are rounding noise into steps of size lr.
SGD = ("--optimizer=SGD", "--optimizer.lr=0.1")
# Enough steps for several seconds, because ranks agree on the step of an interruption once a second.
STEPS = 80


def train(folder: Path, cluster: str, *options: str) -> str:
    """Train the app's transformer on an emulated cluster, and return the job's output.

    Args:
        folder: Folder for the job.
        cluster: Options of the emulator.
        options: More options of the script.
    """
    folder.mkdir(exist_ok=True)
    arguments = [TEXT, "fit", "--config", CONFIG, f"--trainer.max_steps={STEPS}", "--trainer.max_epochs=4", *SGD]
    ended = local(folder, folder, *cluster.split(), "--", *arguments, *options, timeout_s=240, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the model directory of rank 0."""
    (path,) = job_dir(folder).glob("algo-*/model/state_dict.pt")
    weights: dict[str, torch.Tensor] = torch.load(path)
    return weights


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job of two stages on two hosts, fed by a data host, that was interrupted and resumed."""
    folder = tmp_path_factory.mktemp("pipeline")
    cluster = "--group trainer=2 --group data=1 --fault interrupt@step=5"
    return folder, train(folder, cluster, "--trainer.strategy=pipeline")


def test_an_interrupted_pipeline_resumes_at_its_step(interrupted: tuple[Path, str]):
    """Both stages save and resume the same checkpoint, and the job completes all its steps."""
    _, output = interrupted
    saved = re.findall(r"(algo-\d) \| Interrupted: step \d+ is saved in \S+/checkpoints/(\S+),", output)
    assert len(dict(saved)) == 2  # a line for each host
    assert len(set(dict(saved).values())) == 1
    assert f"/checkpoints/{saved[0][1]}, the latest valid checkpoint of the job." in output
    assert f" step={STEPS} " in output


def test_the_table_says_which_ranks_have_which_stages(interrupted: tuple[Path, str]):
    """The table lists the ranks, layers and number of parameters of each stage."""
    _, output = interrupted
    assert "Pipeline over 2 ranks, replicas: 1 (cluster), up to 4 microbatches" in output
    assert re.search(r"\| 0 +0 +network\.embedding to block1 +120,448\n", output)
    assert re.search(r"\| 1 +1 +network\.block2 to head +116,736\n", output)


def test_the_model_directory_has_all_stages(interrupted: tuple[Path, str]):
    """The exported weights have all stages, and the checkpoint loads into the whole model."""
    folder, _ = interrupted
    from app.transformer import TransformerLanguageModel

    (path,) = job_dir(folder).glob("algo-*/model/model.ckpt")
    model = TransformerLanguageModel.load_from_checkpoint(path, weights_only=False)
    assert list(model.state_dict()) == list(model_of(folder))


def test_interruptions_and_data_hosts_change_no_weight(interrupted: tuple[Path, str], tmp_path: Path):
    """An interrupted pipeline with a data host matches an undisturbed one with local loaders, bit by bit."""
    train(tmp_path, "--group trainer=2", "--trainer.strategy=pipeline")
    whole = model_of(tmp_path)
    for name, weight in model_of(interrupted[0]).items():
        assert torch.equal(weight, whole[name]), name


def test_distribution_of_the_sdk_makes_the_pipeline(tmp_path: Path):
    """The SDK's parameters for model parallelism and its number of MPI processes configure the pipeline."""
    parameters = {"partitions": 2, "microbatches": 8, "placement_strategy": "spread", "ddp": True}
    hyperparameters = {"mp_parameters": parameters, "sagemaker_mpi_enabled": True}
    path = tmp_path / "hyperparameters.json"
    path.write_text(json.dumps({**hyperparameters, "sagemaker_mpi_num_of_processes_per_host": 2}))
    output = train(
        tmp_path, f"--group trainer=2 --env LIGHTNING_SM_DEVICES= --hyperparameters {path}", "--trainer.max_steps=4"
    )
    assert "Pipeline over 2 ranks, replicas: 2 (spread), up to 8 microbatches" in output
    assert re.search(r"\| 0 +0, 1 +network", output)
    assert " step=4 " in output


def test_a_pipeline_trains_under_another_launcher(tmp_path: Path):
    """Under torchrun, two hosts with two processes each train two replicas, one on each host."""
    hosts = Hosts(tmp_path)
    python = [sys.executable, TEXT, "fit", "--config", CONFIG, "--config", HYBRID, "--trainer.max_steps=3"]
    command = [*python, "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=2"]
    ended = hosts.run(torchrun(hosts, hosts.names, command, processes=2))
    assert [end.code for end in ended.values()] == [0] * len(ended), ended
    output = "".join(end.output for end in ended.values())
    assert "Pipeline over 2 ranks, replicas: 2 (cluster)" in output
    assert re.search(r"0 +0, 2 +network", output)
    assert "finished: epochs=1 step=3 " in output
