"""The scripts that SDK v3 adds to a job with ``source_code``, unchanged except for the path ``/opt/ml``."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.job_folder import write_job
from tests.integration.launching import variables_of
from tests.sdk import drivers_of

_TIMEOUT_S = 180

pytestmark = [pytest.mark.sdk3, pytest.mark.processes]

_SCRIPT = """
import json, os
import torch
from pytorch_lightning import LightningModule
from lightning_sm import SageMakerCLI

class Tiny(LightningModule):
    def __init__(self, schedule: dict[str, float], note: str | None = "-", nesterov: bool = False, rate: float = 0.5):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.arguments = {"schedule": schedule, "note": note, "nesterov": nesterov, "rate": rate}
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)

if __name__ == "__main__":
    cli = SageMakerCLI(Tiny, save_config_callback=None)
    print("SEEN", json.dumps([cli.model.arguments, cli.trainer.max_epochs, cli.trainer.world_size]))
"""
# As ModelTrainer(hyperparameters={...}) sends them.
_HYPERPARAMETERS = {
    "subcommand": "fit",
    "model": '{"schedule": {"warm": 1, "cool": 2.5}, "note": null, "nesterov": true, "rate": 0.001}',
    "trainer": '{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": false, "enable_progress_bar": false}',
    "_tuning_objective_metric": "val_acc",
    "sagemaker_job_name": "job",
}


@pytest.fixture
def drivers(sdk3_python):
    """The folder of SDK v3's driver scripts."""
    return drivers_of(sdk3_python)


@pytest.fixture
def base(drivers, tmp_path):
    """A one-host job laid out as SDK v3's local mode does it, with code and drivers."""
    folder = write_job(
        tmp_path / "ml",
        {
            "current_host": "algo-1",
            "hosts": ["algo-1"],
            "network_interface_name": "ethwe",
            "current_instance_type": "local",
        },
        channels={"code": {"TrainingInputMode": "File"}, "sm_drivers": {"TrainingInputMode": "File"}},
        hyperparameters=_HYPERPARAMETERS,
    )
    for name in ("output", "model"):
        (folder / name).mkdir()
    data = folder / "input" / "data"
    shutil.copytree(drivers, data / "sm_drivers")
    (data / "sm_drivers" / "sourcecode.json").write_text(json.dumps({"entry_script": "train.py"}))
    (data / "code").mkdir()
    (data / "code" / "train.py").write_text(_SCRIPT)
    for path in (data / "sm_drivers").rglob("*.py"):
        path.write_text(path.read_text().replace("/opt/ml", str(folder)))
    return folder


def _driver(base, drivers, command=None):
    """Write the bash script of ModelTrainer's ``_prepare_train_script``, and return its command and environment."""
    templates = runpy.run_path(str(drivers.parent / "templates.py"))
    driver = templates["EXECUTE_BASIC_SCRIPT_DRIVER"]
    if command is not None:
        driver = templates["EXECUTE_BASE_COMMANDS"].format(base_command=command)
    text = templates["TRAIN_SCRIPT_TEMPLATE"].format(
        working_dir="cd /opt/ml/input/data/code \n", install_requirements="", execute_driver=driver
    )
    script = base / "input" / "data" / "sm_drivers" / "sm_train.sh"
    script.write_text(text.replace("/opt/ml", str(base)))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return ["bash", str(script)], variables_of(base, TRAINING_JOB_NAME="job", PATH=path, CUDA_VISIBLE_DEVICES="")


def _drive(base, drivers, command=None):
    script, env = _driver(base, drivers, command)
    return subprocess.run(script, env=env, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)


@pytest.mark.parametrize("command", [None, "exec lightning-sm train train.py"], ids=["driver", "launcher"])
def test_a_script_gets_its_arguments(base, drivers, command):
    """SageMakerCLI parses the hyperparameters as passed by the driver, and as passed by the launcher."""
    ended = _drive(base, drivers, command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = next(line for line in ended.stdout.splitlines() if "SEEN " in line)
    arguments, max_epochs, world_size = json.loads(said.partition("SEEN ")[2])
    assert arguments == {"schedule": {"warm": 1.0, "cool": 2.5}, "note": None, "nesterov": True, "rate": 0.001}
    assert (max_epochs, world_size) == (1, 1)
    assert ("host algo-1, group homogeneousCluster" in ended.stderr) == (command is not None)
    assert not (base / "output" / "failure").exists()


def test_a_stop_reaches_a_script_that_our_launcher_started(base, drivers):
    """SIGTERM reaches the script if ``exec`` replaces the driver's shell, which does not forward it."""
    (base / "input" / "data" / "code" / "wait.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        f"print('ready', flush=True)\ntime.sleep({_TIMEOUT_S})"
    )
    command, env = _driver(base, drivers, "exec lightning-sm train wait.py")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert "ready\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGTERM)
        assert process.wait(_TIMEOUT_S) == 42


# train/container_drivers/scripts/environment.py writes export SM_HP_<NAME>='<value>', unescaped, for bash to source.
@pytest.mark.parametrize(
    ("hyperparameters", "complaint"),
    [
        pytest.param({"trainer.max_epochs": "1"}, "`SM_HP_TRAINER.MAX_EPOCHS=1': not a valid identifier", id="dot"),
        pytest.param({"model": '{"phrase": "it\'s"}'}, "unexpected EOF while looking for matching", id="quote"),
    ],
)
def test_dots_in_names_and_single_quotes_are_beyond_the_driver(base, drivers, hyperparameters, complaint):
    """Dots and single quotes break the driver's shell script before our code runs; our entry point accepts them."""
    write_job(base, hyperparameters=hyperparameters)
    ended = _drive(base, drivers)
    assert ended.returncode != 0
    assert complaint in ended.stderr
    assert "SEEN" not in ended.stdout
