"""Run one training job in the local mode of SDK v3: ``model_trainer.py SETTINGS``, with a JSON file from sdk_v3.py."""

import json
import sys
from pathlib import Path

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, InputData, SourceCode
from sagemaker.train.distributed import Torchrun
from sagemaker.train.model_trainer import Mode

if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    arguments = settings["arguments"]
    if "source_code" in arguments:
        arguments["source_code"] = SourceCode(**arguments["source_code"])
    if "distributed" in arguments:
        arguments["distributed"] = Torchrun(**arguments["distributed"])
    trainer = ModelTrainer(
        training_mode=Mode.LOCAL_CONTAINER,
        compute=Compute(instance_type="local_cpu", instance_count=settings["num_hosts"]),
        local_container_root=settings["root"],
        **arguments,
    )
    inputs = [InputData(channel_name=name, data_source=path) for name, path in settings["inputs"].items()]
    trainer.train(input_data_config=inputs or None)
