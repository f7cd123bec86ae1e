"""A host with two local ranks, one of which fails before the process group exists."""

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


@pytest.mark.proof  # tests/unit/training/test_process.py covers the rank, tests/unit/launcher the reason
def test_an_error_before_the_process_group_names_its_rank(tmp_path):
    """The failure reason starts with the error and names the host and the rank."""
    hosts = Hosts(tmp_path, {"homogeneousCluster": ("algo-1",)})
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    ended = hosts.run({"algo-1": [sys.executable, "-m", "lightning_sm", "train", str(script)]})["algo-1"]
    assert ended.code == 1  # rank 1's exit code; Lightning killed rank 0 because of it
    reason = (hosts.folder / "algo-1" / "output" / "failure").read_text()
    assert reason.startswith("ValueError: no such column\non trainer host algo-1, rank 1 (")
