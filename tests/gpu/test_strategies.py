"""The strategies on GPUs, with page-locked batches from a data host: over NCCL, or as two ranks on one GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.exported_model import exported_weights
from tests.gpu import staged
from tests.integration.emulators import job_dir

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 240
# SGD in 32 bits, so that the weights can be compared.
OPTIONS = (
    "--config=app/configs/transformer.yaml",
    *("--optimizer=SGD", "--optimizer.lr=0.1", "--trainer.max_epochs=1", "--trainer.max_steps=20"),
    *("--trainer.limit_val_batches=2", "--trainer.accelerator=gpu", "--data.batch_size=8"),
)
ONE = ("trainer=1:ml.g5.xlarge", "--trainer.devices=1")
# One host with two GPUs, or two hosts that share a GPU.
HAS_TWO = torch.cuda.device_count() > 1
TWO = (
    ("trainer=1:ml.g5.12xlarge", "--trainer.devices=2")
    if HAS_TWO
    else ("trainer=2:ml.g5.xlarge", "--trainer.devices=1")
)
BACKEND = f"--trainer.strategy.process_group_backend={'nccl' if HAS_TWO else staged.NAME}"


def weights(folder: Path, ranks: tuple[str, str], *options: str) -> dict[str, torch.Tensor]:
    """Train the app's transformer with a data host, and return the exported weights."""
    group, devices = ranks
    command = [sys.executable, "-m", "lightning_sm", "local", "--group", group, "--group", "data=1"]
    command += ["--env", f"CUDA_VISIBLE_DEVICES={'0,1' if HAS_TWO else '0'}", "--base-dir", str(folder)]
    command += ["--", "tests/gpu/train_text.py", "fit", *OPTIONS, devices, *options]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, errors="replace"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return exported_weights(job_dir(folder).glob("algo-*/model"))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that two sets of weights are equal up to rounding."""
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Train two ranks with DDP, and return the weights."""
    folder = tmp_path_factory.mktemp("ddp")
    return weights(folder, TWO, "--trainer.strategy=DDPStrategy", BACKEND)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Train on one GPU, and return the weights."""
    return weights(tmp_path_factory.mktemp("one"), ONE)


def test_one_rank_of_ddp_trains_as_without_over_nccl(tmp_path: Path, of_one: dict[str, torch.Tensor]) -> None:
    """A process group of a single rank still uses NCCL."""
    assert_close(weights(tmp_path, ONE, "--trainer.strategy=ddp"), of_one)


@pytest.mark.parametrize("strategy", ["FSDPStrategy", "ModelParallelStrategy"])
def test_sharding_trains_as_ddp_does(tmp_path: Path, of_ddp: dict[str, torch.Tensor], strategy: str) -> None:
    """Two ranks with half of the parameters each reach the weights of two ranks with all parameters."""
    assert_close(weights(tmp_path, TWO, f"--trainer.strategy={strategy}", BACKEND), of_ddp)


def test_a_pipeline_trains_as_one_gpu_does(tmp_path: Path, of_one: dict[str, torch.Tensor]) -> None:
    """Two GPUs with half of the layers each reach the weights of one GPU."""
    strategy = ["--trainer.strategy=lightning_sm.PipelineParallelStrategy"]
    assert_close(weights(tmp_path, TWO, *strategy, BACKEND), of_one)
