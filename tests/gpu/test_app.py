"""The example app trains on a GPU with batches from a data host, and resumes there after an interruption."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sm.record.events import HostUse, Steps
from lightning_sm.record.runs import read_run

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

_REPOSITORY = Path(__file__).parents[2]
_TIMEOUT_S = 240


def run(folder, *faults):
    """Train on one GPU host and one data host, and return the whole output."""
    command = [sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=1:ml.g5.xlarge", "--group", "data=1"]
    command += ["--base-dir", str(folder), "--env", "CUDA_VISIBLE_DEVICES=0", *faults]
    command += ["--", "app/train.py", "fit", "--config", "app/configs/digits.yaml"]
    command += ["--trainer.accelerator=gpu", "--trainer.devices=1"]
    result = subprocess.run(
        command, cwd=_REPOSITORY, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, errors="replace"
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    return output


def best_accuracy(output):
    """Return the best validation accuracy in the progress lines."""
    accuracies = [float(value) for value in re.findall(r"val_acc[=: ]+([01]\.\d+)", output)]
    assert accuracies, output
    return max(accuracies)


def test_the_app_learns_from_the_batches_of_a_data_host(tmp_path, record_property):
    """The job uses and measures the GPU, reaches the accuracy of a CPU, and logs how long the GPU waited."""
    output = run(tmp_path)
    assert "GPU available: True (cuda), used: True" in output
    assert best_accuracy(output) >= 0.97
    shares = [float(share) for share in re.findall(r" data_wait=([\d.]+)%", output)]
    assert shares, output
    record_property("data wait, in % per epoch", shares)
    records = read_run(tmp_path).records
    steps = [line for record in records for line in record.lines if isinstance(line, Steps)]
    assert any(line.gpu_parts for line in steps), steps
    uses = [gpu for record in records for line in record.lines if isinstance(line, HostUse) for gpu in line.gpus]
    assert max(use.memory_bytes for use in uses) > 0


def test_an_interrupted_job_resumes_on_the_gpu(tmp_path):
    """After SIGTERM in the third epoch, a second attempt resumes from the checkpoint and reaches the same accuracy."""
    output = run(tmp_path, "--fault", "interrupt@epoch=3")
    assert "latest valid checkpoint" in output
    assert best_accuracy(output) >= 0.97
