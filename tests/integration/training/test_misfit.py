"""A job that resumes automatically from a checkpoint that does not fit its script."""

from __future__ import annotations

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.launching import failure, train

_SCRIPT = """
import os, torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_sm import SageMakerTrainer

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, int(os.environ["WIDTH"]))

    def configure_optimizers(self):
        groups = [{"params": [parameter]} for parameter in self.parameters()]
        optimizer = getattr(torch.optim, os.environ.get("OPTIMIZER", "SGD"))
        return optimizer(groups if "GROUPS" in os.environ else self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint):
        if "BUSY" in os.environ:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

trainer = SageMakerTrainer(
    accelerator="cpu", devices=1, max_steps=int(os.environ["STEPS"]), limit_val_batches=0, enable_progress_bar=False,
    logger=False, callbacks=[ModelCheckpoint(every_n_train_steps=1)],
)
trainer.fit(Model())
"""


@pytest.mark.proof
@pytest.mark.processes
def test_a_checkpoint_of_another_model_is_named_with_what_to_do(alone, work):
    """A misfit is not restarted, and its reason says that the resume was automatic; other errors are unchanged."""
    folder = alone / "checkpoints"
    write_job(alone, resource_config({"g": ["algo-1"]}, "algo-1"), checkpoint={"LocalPath": str(folder)})
    (work / "train.py").write_text(_SCRIPT)
    first = train(alone, work, "train.py", WIDTH="2", STEPS="1")
    assert first.returncode == 0, first.stderr
    for other, said in (
        ({"WIDTH": "3"}, "RuntimeError: Error(s) in loading state_dict for Model:\n\tsize mismatch for layer.weight: "),
        ({"WIDTH": "2", "GROUPS": "1"}, "ValueError: loaded state dict has a different number of parameter groups"),
        # torch loads this, and then fails at the first step, or trains with the other optimizer's settings.
        (
            {"WIDTH": "2", "OPTIMIZER": "Adam"},
            "ValueError: It was saved with torch.optim.sgd.SGD, but the script",
        ),
    ):
        ended = train(alone, work, "train.py", STEPS="2", LIGHTNING_SM_MAX_RESTARTS="1", **other)
        assert ended.returncode == 1
        reason = failure(alone)
        start = "lightning_sm.errors.CheckpointMismatchError: The job resumes automatically from "
        assert reason.startswith(f"{start}{folder}/")
        assert f"does not fit this script. {said}" in reason.replace("    size", "\tsize")
        assert "set another checkpoint_s3_uri" in reason
        assert "Restart 1 of 1" not in ended.stderr
    ended = train(alone, work, "train.py", STEPS="2", WIDTH="2", BUSY="1")
    assert failure(alone).startswith("RuntimeError: CUDA error: uncorrectable ECC error")
