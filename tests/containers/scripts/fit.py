"""Run one training job in the local mode of SDK v2: ``fit.py SETTINGS``, with a JSON file from local_mode.py."""

import importlib
import json
import sys
from pathlib import Path

from sagemaker.inputs import TrainingInput
from sagemaker.local import LocalSession


def find(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def channel(value):
    return TrainingInput(**value) if isinstance(value, dict) else value


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    session = LocalSession()
    session.config = {"local": settings["local"]}
    arguments = settings["estimator_arguments"]
    estimator = find(settings["estimator"])(sagemaker_session=session, **arguments)
    inputs = {name: channel(value) for name, value in settings["inputs"].items()}
    estimator.fit(inputs or None)
    print("fit() returned; the model:", estimator.model_data)
