"""A job that is stopped while its script still runs after ``fit``."""

from __future__ import annotations

import signal

import pytest

from tests.integration.launching import failure, started

_SCRIPT = """
import time
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_sm import SageMakerTrainer

trainer = SageMakerTrainer(
    accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, enable_progress_bar=False, logger=False
)
trainer.fit(BoringModel())
{more}
print("after", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
@pytest.mark.matrix(rows=["fit and test"])
@pytest.mark.parametrize("more", ["", "trainer.test(BoringModel())"], ids=["fit", "fit and test"])
def test_the_first_signal_says_what_happens_and_the_second_ends_the_script(alone, work, more):
    """With nothing to save, the script continues until SIGTERM, and exits with 143, not by SIGKILL."""
    (work / "train.py").write_text(_SCRIPT.format(more=more))
    with started(alone, work, "train.py", LIGHTNING_SM_STOP_SCHEDULE="1,30") as running:
        running.wait_for("after")
        running.process.send_signal(signal.SIGTERM)
        said = running.wait_for("SIGUSR2: not training,")
        assert said.endswith("so there is no checkpoint to save. The script continues until SIGTERM.")
        assert running.exit_code() == 143
    assert failure(alone).startswith("The job was stopped or interrupted (SIGTERM). ")
