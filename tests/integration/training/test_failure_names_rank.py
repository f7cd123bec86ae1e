"""Two local ranks of a host, of which one fails before there is a process group."""

from __future__ import annotations

import sys

import pytest

from tests.integration.hosts import Hosts

_SCRIPT = """
import os
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_sm import SageMakerTrainer

trainer = SageMakerTrainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, enable_progress_bar=False, enable_model_summary=False
)
if os.environ.get("LOCAL_RANK") == "1":
    raise ValueError("no such column")
trainer.fit(BoringModel())
"""


@pytest.mark.proof  # tests/unit/training/test_process.py has the rank, tests/unit/launcher the reason
def test_an_error_before_the_process_group_names_its_rank(tmp_path):
    """In the reason of the failure."""
    hosts = Hosts(tmp_path, {"homogeneousCluster": ("algo-1",)})
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    ended = hosts.run({"algo-1": [sys.executable, "-m", "lightning_sm", "train", str(script)]})["algo-1"]
    assert ended.code == 1  # of rank 1; Lightning has killed rank 0 because of it
    reason = (hosts.folder / "algo-1" / "output" / "failure").read_text()
    assert reason.startswith("ValueError: no such column\non trainer host algo-1, rank 1 (")
