"""Two local ranks of a host, of which one fails before there is a process group."""

from __future__ import annotations

import sys

import pytest

from tests.integration.hosts import Hosts

_SCRIPT = """
import os, warnings
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_sm import SageMakerTrainer

trainer = SageMakerTrainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, enable_progress_bar=False, enable_model_summary=False
)
if os.environ.get("LOCAL_RANK") == "1":
    warnings.warn("small batch")
    raise ValueError("no such column")
trainer.fit(BoringModel())
"""


@pytest.mark.proof  # the unit tests have the marks, and what the launcher makes of them
def test_an_error_before_the_process_group_names_its_rank(tmp_path):
    """Also in the reason of the failure; what it warned of is marked, too."""
    hosts = Hosts(tmp_path, {"homogeneousCluster": ("algo-1",)})
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    ended = hosts.run({"algo-1": [sys.executable, "-m", "lightning_sm", "train", str(script)]})["algo-1"]
    assert ended.code == 1  # of rank 1; Lightning has killed rank 0 because of it
    assert "[rank1]: ValueError: no such column" in ended.output
    assert f"[rank1]: {script}:10: UserWarning: small batch\n[rank1]:   warnings.warn" in ended.output
    reason = (hosts.folder / "algo-1" / "output" / "failure").read_text()
    assert reason.startswith("ValueError: no such column\non trainer host algo-1, rank 1 (")
