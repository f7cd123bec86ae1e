"""Run a job for each known limit, and keep its record here: ``python -m tests.records [NAME ...]``.

The jobs take about 20 s each, on any machine: everything that is slow sleeps.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_sm.record.events import find_files

_HERE = Path(__file__).parent
_TIMEOUT_S = 300.0
_TRAINER, _TWO_TRAINERS = ("--group", "trainer=1"), ("--group", "trainer=2")
_DATA, _TWO_DATA = (*_TRAINER, "--group", "data=1"), (*_TRAINER, "--group", "data=2")
_EVERY_20_STEPS = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=20")
# Options of lightning-sm local, steps, arguments of train.py.
JOBS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "transforms_on_data_hosts": (_DATA, 120, ("--data.item_s=0.1", "--data_service.workers=1")),
    "transforms_local": (_TRAINER, 120, ("--data.item_s=0.1", "--data.num_workers=1")),
    "transforms_in_training_process": (_TRAINER, 120, ("--data.item_s=0.1",)),
    "network": (_DATA, 60, ("--data.num_values=16000000", "--data_service.workers=2")),
    "slow_data_host": (
        _TWO_DATA,
        300,
        (
            *("--data.item_s=0.04", "--data.slow_host=algo-3", "--data.slow_item_s=0.6", "--data_service.workers=1"),
            "--model.forward_s=0.005",
        ),
    ),
    "data_host_without_batches": (
        _TWO_DATA,
        300,
        (
            *("--data.item_s=0.04", "--data.slow_host=algo-3", "--data.slow_item_s=1000", "--data_service.workers=1"),
            "--model.forward_s=0.005",
        ),
    ),
    "data_host_that_came_back": (
        (*_DATA, "--fault", "kill-rank:data-1@step=100"),
        300,
        ("--data.item_s=0.005", "--data_service.workers=1", "--data_service.window_batches=4"),
    ),
    "slow_rank": (_TWO_TRAINERS, 100, ("--model.slow_rank=1", "--model.slow_forward_s=0.12")),
    "checkpoints": (_TRAINER, 200, ("--model.checkpoint_s=1.5", *_EVERY_20_STEPS)),
    "validation": (_TRAINER, 200, ("--data.validation_s=0.05", "--trainer.val_check_interval=20")),
    "optimizer": (_TRAINER, 120, ("--model.optimizer_s=0.1",)),
    "python": (_TRAINER, 120, ("--model.forward_s=0.1",)),
    "to_device": (_TRAINER, 120, ("--model.to_device_s=0.1",)),
    "start_up": (_TRAINER, 100, ("--data.setup_s=60",)),
    "restart_within_job": (
        (*_TRAINER, "--fault", "kill-rank:trainer-1@step=100", "--env", "LIGHTNING_SM_MAX_RESTARTS=1"),
        200,
        ("--data.setup_s=5",),
    ),
    "restarts": ((*_TRAINER, "--fault", "interrupt@step=100"), 200, ("--data.setup_s=5",)),
}


def record(name: str) -> None:
    """Run the job, and replace its record.

    Args:
        name: One of ``JOBS``.
    """
    cluster, steps, arguments = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(_HERE / "train.py", folder)
        command = [sys.executable, "-m", "lightning_sm", "local", "--base-dir", f"{folder}/jobs", "--seed", "1"]
        command += [*cluster, "--env", "LIGHTNING_SM_REPORT_S=0", "--", "train.py", "fit", "--trainer.logger=false"]
        command += [f"--trainer.max_steps={steps}", "--trainer.enable_model_summary=false", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            sys.exit(f"The job {name} failed:\n{done.stdout}\n{done.stderr}")
        shutil.rmtree(_HERE / name, ignore_errors=True)
        seen = set()
        for file in find_files(Path(folder)):
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            copy = _HERE / name / file.parent.name / file.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            (job,) = Path(folder, "jobs").iterdir()
            text = file.read_text().replace(str(job / "ml"), "/opt/ml").replace(job.name, name)
            copy.write_text(text.replace(folder, "/opt/ml/code").replace(sys.prefix, "/opt/conda"))


if __name__ == "__main__":
    for known in sys.argv[1:] or JOBS:
        sys.stdout.write(f"{known}\n")
        record(known)
