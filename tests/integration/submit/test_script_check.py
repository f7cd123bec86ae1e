"""Hyperparameters against the parser of a script with SageMakerCLI, as on a host, before anything is sent."""

import json
from dataclasses import replace

import pytest

from lightning_sm.submit.job_file import Group, InputChannel, Job
from lightning_sm.submit.problems import Findings
from lightning_sm.submit.script_check import check_hyperparameters

pytestmark = pytest.mark.processes

SCRIPT = """
from pytorch_lightning import LightningDataModule
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_sm import SageMakerCLI


class Model(BoringModel):
    def __init__(self, width: int = 3) -> None:
        open("made", "w").close()
        super().__init__()


class Data(LightningDataModule):
    def __init__(self, data_dir: str, batch_size: int = 2) -> None:
        super().__init__()


if __name__ == "__main__":
    SageMakerCLI(Model, Data)
"""
JOB = Job(
    image="x",
    groups={"trainer": Group("ml.g5.xlarge", 2), "data": Group("ml.c5.xlarge", 1)},
    channels={"training": InputChannel("s3://bucket/data", ["data"])},
)


def test_the_script_parses_what_it_will_get_and_makes_nothing(tmp_path, caplog):
    """The channel fills in the folder, a subcommand is not needed; a wrong type and an unknown option are problems."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    good = {"data.batch_size": "64", "trainer": json.dumps({"max_epochs": 3, "strategy": "ddp"})}
    for hyperparameters, words in (
        (good, None),
        ({**good, "data.batch_size": '"many"', "trainer.num_nodes": "7"}, "data.batch_size"),
    ):
        findings = Findings()
        job = replace(JOB, local_script=str(script), script="train.py")
        with caplog.at_level("INFO", "lightning_sm"):
            check_hyperparameters(job, hyperparameters, findings)
        if words is None:
            assert findings.problems == []
            assert f"The parser of {script} accepts the hyperparameters" in caplog.text
        else:
            (problem,) = findings.problems
            assert words in problem.text
    assert not (tmp_path / "made").exists()
