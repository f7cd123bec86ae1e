"""The README's main job: the example app on an emulated cluster, as ``make train`` runs it."""

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 600


def _local(*arguments):
    """Run ``lightning-sm local`` and return its output."""
    command = [sys.executable, "-m", "lightning_sm", "local", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _train(base_dir, num_hosts):
    """Train two steps with a global batch of 8 samples."""
    _local(
        *("--group", f"trainer={num_hosts}", "--base-dir", base_dir, "--"),
        *("app/train.py", "fit", "--config", "app/configs/digits.yaml"),
        *("--data.augment=false", f"--data.batch_size={8 // num_hosts}", "--trainer.strategy=ddp"),
        *("--trainer.precision=64-true", "--trainer.max_epochs=1", "--trainer.enable_model_summary=false"),
        *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"),
        *("--trainer.callbacks=null", "--trainer.enable_checkpointing=false"),
        *("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv"),
    )


def _losses(base_dir):
    """Read the job's logged losses and accuracies by name."""
    (path,) = base_dir.glob("*/algo-*/output/data/*/csv/**/metrics.csv")
    with path.open() as file:
        return {
            name: float(value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if name in ("train_loss", "val_loss", "train_acc", "val_acc") and value
        }


def test_two_hosts_and_one_host_give_the_same_losses(tmp_path):
    """With the same global batch, losses agree to one part in a billion.

    Augmentation is off, because its random numbers depend on the rank. The job uses double precision: in single
    precision, rounding differences between reduction orders grow to about one part in a hundred within two epochs.
    """
    for number in (1, 2):
        _train(tmp_path / str(number), number)
    one, two = (_losses(tmp_path / str(number)) for number in (1, 2))
    assert set(one) == {"train_loss", "val_loss", "train_acc", "val_acc"}
    for name, value in one.items():
        assert math.isclose(value, two[name], rel_tol=1e-9), f"{name}: {value} on one host, {two[name]} on two"


@pytest.mark.proof
def test_make_train_reaches_the_accuracy(tmp_path):
    """Two trainer hosts and two data hosts reach an accuracy of 0.95, and the last line has the model's path."""
    output = _local(
        *("--group", "trainer=2", "--group", "data=2", "--base-dir", tmp_path, "--"),
        *("app/train.py", "fit", "--config", "app/configs/digits.yaml"),
    )
    accuracy = float(re.findall(r"finished: .*val_acc=([0-9.eE+-]+)", output)[-1])
    assert accuracy >= 0.95
    (model_dir,) = (path.parent for path in tmp_path.glob("*/algo-*/model/model.ckpt"))
    last = output.splitlines()[-1]
    assert last == f"Model of {model_dir.parent.name}: {model_dir} (config.yaml, model.ckpt, state_dict.pt)"
    assert list(tmp_path.rglob("events.out.tfevents.*"))
