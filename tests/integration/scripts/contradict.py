"""Create Trainers that contradict the cluster, and write the result of each attempt.

Arguments: the settings of each Trainer as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_sm import SageMakerEnvironment
from lightning_sm.errors import TopologyError


def attempt(settings):
    started = time.monotonic()
    try:
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, plugins=[SageMakerEnvironment()], **settings
        )
        trainer.fit(BoringModel())
    except TopologyError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": None, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    torch.set_num_threads(1)
    ended = [attempt(json.loads(argument)) for argument in sys.argv[1:]]
    (Path(os.environ["SAGEMAKER_BASE_DIR"]) / "output" / "ended.json").write_text(json.dumps(ended))
