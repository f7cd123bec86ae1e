"""The strategies on GPUs, over NCCL, with the page-locked batches of a data host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.emulators import job_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    # NCCL refuses two ranks on one GPU, and Gloo cannot send a GPU's tensors from one rank to another.
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 NVIDIA GPUs, not {torch.cuda.device_count()}"),
]

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 240
# SGD in 32 bits: the weights can be compared.
OPTIONS = (
    "--config=app/configs/transformer.yaml",
    *("--optimizer=SGD", "--optimizer.lr=0.1", "--trainer.max_epochs=1", "--trainer.max_steps=20"),
    *("--trainer.limit_val_batches=2", "--trainer.accelerator=gpu", "--data.batch_size=8"),
)


def weights(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    """Train the app's transformer on one host with two GPUs and a data host; returns the exported weights."""
    command = [sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=1:ml.g5.12xlarge"]
    command += ["--group", "data=1", "--base-dir", str(folder), "--", "app/train_text.py", "fit", *OPTIONS, *options]
    ended = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, errors="replace"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = job_dir(folder).glob("algo-*/model/state_dict.pt")
    found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu")
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "ModelParallelStrategy"])
def test_sharding_trains_as_ddp_does(tmp_path: Path, strategy: str) -> None:
    """Two ranks with half of the parameters each end with the weights of two ranks with all of them."""
    expected = weights(tmp_path / "ddp", "--trainer.devices=2", "--trainer.strategy=ddp")
    found = weights(tmp_path / "sharded", "--trainer.devices=2", f"--trainer.strategy={strategy}")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_pipeline_trains_as_one_gpu_does(tmp_path: Path, schedule: str) -> None:
    """Two GPUs with half of the layers each end with the weights of one GPU."""
    expected = weights(tmp_path / "one", "--trainer.devices=1")
    strategy = ["--trainer.strategy=lightning_sm.PipelineParallelStrategy", f"--trainer.strategy.schedule={schedule}"]
    found = weights(tmp_path / "two", "--trainer.devices=2", *strategy)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-4)
