"""Both distributions of Lightning, together and alone: the one that the script imports first is used."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.hosts import REPOSITORY, SCRIPTS

pytestmark = [pytest.mark.lightning_variants, pytest.mark.processes]

# The same range as for pytorch-lightning in pyproject.toml.
REQUIREMENT = "lightning>=2.5.3,<2.7,!=2.6.2,!=2.6.3"
TIMEOUT_S = 120
PYTORCH_LIGHTNING, LIGHTNING = "pytorch_lightning", "lightning.pytorch"


@dataclass(frozen=True)
class Python:
    """An interpreter with a set of packages.

    Attributes:
        options: Options of the interpreter.
        path: Its ``PYTHONPATH``.
    """

    options: tuple[str, ...]
    path: tuple[Path, ...]

    def run(self, base_dir, *arguments, code=None, **variables):
        """Run the script, or a piece of code, on the only host of a job.

        Args:
            base_dir: The host's ``/opt/ml``.
            arguments: Arguments of the script.
            code: Code to run instead of the script.
            variables: Environment variables.
        """
        command = ["-c", code] if code is not None else [str(SCRIPTS / "train_points.py"), *arguments]
        return subprocess.run(
            [sys.executable, *self.options, *command],
            cwd=base_dir,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(base_dir),
                "PYTHONPATH": os.pathsep.join(map(str, self.path)),
                "SAGEMAKER_BASE_DIR": str(base_dir),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                **variables,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )


@pytest.fixture(scope="module")
def lightning_dir(tmp_path_factory):
    """A folder that contains only the distribution ``lightning``."""
    folder = tmp_path_factory.mktemp("lightning")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, REQUIREMENT], check=True, timeout=TIMEOUT_S)
    return folder


@pytest.fixture(scope="module")
def both(lightning_dir):
    """The virtual environment plus ``lightning``."""
    return Python((), (REPOSITORY, lightning_dir))


@pytest.fixture(scope="module")
def lightning_alone(lightning_dir, tmp_path_factory):
    """The virtual environment with ``lightning`` in place of ``pytorch_lightning``."""
    packages = _packages_without(("pytorch_lightning", "lightning_fabric"), tmp_path_factory.mktemp("packages"))
    return Python(("-S",), (REPOSITORY, lightning_dir, packages))


@pytest.fixture(scope="module")
def pytorch_lightning_alone(tmp_path_factory):
    """The virtual environment without ``lightning``, which somebody may have installed."""
    if importlib.util.find_spec("lightning") is None:
        return Python((), (REPOSITORY,))
    return Python(("-S",), (REPOSITORY, _packages_without(("lightning",), tmp_path_factory.mktemp("packages"))))


def _packages_without(hidden, folder):
    """Link all installed packages except the hidden ones."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        name = entry.name.partition("-")[0].partition(".")[0]
        if name not in hidden:
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def base_dir(tmp_path):
    """The ``/opt/ml`` of a job's only host, with a channel."""
    (tmp_path / "input" / "data" / "training").mkdir(parents=True)
    channels = {"training": {"TrainingInputMode": "File"}}
    return write_job(tmp_path, resource_config({"trainer": ["algo-1"]}, "algo-1", interface="lo"), channels=channels)


@pytest.mark.parametrize(
    ("variant", "imports", "model"),
    [
        ("both", "lightning_sm", PYTORCH_LIGHTNING),
        ("both", "lightning,lightning_sm", LIGHTNING),
        ("both", "lightning.pytorch,pytorch_lightning,lightning_sm", LIGHTNING),
        ("lightning_alone", "lightning_sm", LIGHTNING),
        ("pytorch_lightning_alone", "lightning_sm", PYTORCH_LIGHTNING),
    ],
)
def test_a_script_trains_with_its_distribution(request, base_dir, variant, imports, model):
    """All classes derive from the distribution that was imported first, and the job writes its model."""
    python = request.getfixturevalue(variant)
    ended = python.run(base_dir, "fit", "--trainer.callbacks+=ModelCheckpoint", IMPORTS=imports, MODEL=model)
    expected = "lightning" if model == LIGHTNING else "lightning_fabric pytorch_lightning"
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"derived from: {expected}"
    assert "epoch=2/2 step=8 validation=2 val_acc=" in ended.stderr
    assert {path.name for path in (base_dir / "model").iterdir()} == {"model.ckpt", "state_dict.pt", "config.yaml"}
    assert (base_dir / "output" / "data" / "algo-1" / "seen.txt").read_text().endswith("training")


@pytest.mark.parametrize(
    ("imports", "model", "chosen"),
    [
        ("lightning_sm", LIGHTNING, PYTORCH_LIGHTNING),
        ("pytorch_lightning,lightning_sm", LIGHTNING, PYTORCH_LIGHTNING),
        ("lightning.pytorch,lightning_sm", PYTORCH_LIGHTNING, LIGHTNING),
    ],
)
def test_a_mix_is_refused(both, base_dir, imports, model, chosen):
    """Mixing distributions raises an error that names the class, both distributions and the import to put first."""
    ended = both.run(base_dir, "fit", IMPORTS=f"{imports},lightning_sm.training.cli", MODEL=model)
    assert ended.returncode == 1
    error = ended.stderr.strip().splitlines()[-1]
    assert error.startswith("lightning_sm.errors.MixedLightningError: Model derives from ")
    assert f"lightning_sm was loaded with {chosen}" in error
    assert f"Import {model} before lightning_sm" in error


_PLAIN_TRAINER = """
import sys
import {first}
import {second}
try:
    trainer = sys.modules["{trainer}"].Trainer(strategy="pipeline", accelerator="cpu", devices=2, logger=False)
except Exception as error:
    print(type(error).__name__, error)
else:
    print(type(trainer.strategy).__mro__[1].__module__.partition(".strategies")[0])
"""


@pytest.mark.parametrize(
    ("variant", "first", "second"),
    [
        ("both", "lightning_sm", PYTORCH_LIGHTNING),
        ("both", LIGHTNING, "lightning_sm"),
        ("lightning_alone", "lightning_sm", LIGHTNING),
    ],
)
def test_a_plain_trainer_finds_our_strategies_by_name(request, base_dir, variant, first, second):
    """A plain Trainer gets our strategies in its distribution, whichever module was imported first."""
    python = request.getfixturevalue(variant)
    (trainer,) = {first, second} - {"lightning_sm"}
    ended = python.run(base_dir, code=_PLAIN_TRAINER.format(first=first, second=second, trainer=trainer))
    assert ended.stdout.strip() == trainer, ended.stderr


def test_our_strategies_refuse_the_trainer_of_the_other_distribution(both, base_dir):
    """The error names the import to put first, where Lightning would only call the strategy invalid."""
    imports = {"first": PYTORCH_LIGHTNING, "second": f"lightning_sm, {LIGHTNING}", "trainer": LIGHTNING}
    ended = both.run(base_dir, code=_PLAIN_TRAINER.format(**imports))
    assert "MixedLightningError The Trainer is from lightning.pytorch, but lightning_sm was loaded with" in ended.stdout
    assert "Import lightning.pytorch before lightning_sm" in ended.stdout


# One process covers all cases, because only the CLI's __init__ runs.
_CLASSES_OF_THE_OTHER = """
import json
from pytorch_lightning import LightningModule
from lightning_sm import SageMakerCLI
from lightning_sm.errors import MixedLightningError
import lightning.pytorch as other
from lightning.pytorch.callbacks import ModelCheckpoint

class Data(other.LightningDataModule): pass
class Model(LightningModule): pass
class OtherTrainer(other.Trainer): pass

def make(*args, **kwargs):
    try:
        SageMakerCLI(*args, **kwargs)
    except MixedLightningError as error:
        return str(error).partition(" derives from")[0]

print(json.dumps([
    make(Model, Data),
    make(Model, trainer_class=OtherTrainer),
    make(Model, trainer_defaults={"callbacks": ModelCheckpoint()}),
    make(Model, trainer_defaults={"callbacks": [ModelCheckpoint()]}),
]))
"""


def test_other_classes_of_a_mix_are_refused(both, base_dir):
    """DataModules, Trainers and callbacks are checked like the model."""
    ended = both.run(base_dir, code=_CLASSES_OF_THE_OTHER)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == ["Data", "OtherTrainer", "ModelCheckpoint", "ModelCheckpoint"]


# Sorted imports: lightning_sm chooses a distribution before the script imports the other one.
_TRAINER_OF_THE_OTHER = """
import json
from lightning_sm import RemoteDataModule, SageMakerTrainer
from lightning_sm.errors import MixedLightningError
import lightning.pytorch as other
import pytorch_lightning as chosen
from torch.utils.data import DataLoader

class Data(other.LightningDataModule): pass
class Model(other.LightningModule): pass
class Right(chosen.LightningModule): pass

trainer = SageMakerTrainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)

def refused(method, *args, **kwargs):
    try:
        method(*args, **kwargs)
    except MixedLightningError as error:
        return str(error).partition(" derives from")[0]
    except Exception as error:
        return repr(error)

print(json.dumps([
    refused(trainer.fit, Model(), DataLoader([0])),
    *(refused(method, Right(), datamodule=Data()) for method in (trainer.fit, trainer.validate, trainer.test)),
    refused(trainer.predict, Right(), Data()),
    refused(SageMakerTrainer, callbacks=[other.callbacks.ModelCheckpoint()]),
    refused(RemoteDataModule, Data(), ["127.0.0.1:1"]),
]))
"""


def test_a_trainer_refuses_a_mix(both, base_dir):
    """SageMakerTrainer checks callbacks, models and DataModules, and RemoteDataModule checks its DataModule."""
    ended = both.run(base_dir, code=_TRAINER_OF_THE_OTHER)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == ["Model", *["Data"] * 4, "ModelCheckpoint", "Data"]


def test_without_lightning_the_error_says_what_to_install(tmp_path_factory, base_dir):
    """Without either distribution, the import fails and names the package to install."""
    hidden = ("pytorch_lightning", "lightning", "lightning_fabric")
    python = Python(("-S",), (REPOSITORY, _packages_without(hidden, tmp_path_factory.mktemp("packages"))))
    ended = python.run(base_dir, code="from lightning_sm import SageMakerCLI")
    assert ended.returncode == 1
    assert "lightning_sm needs PyTorch Lightning: pip install pytorch-lightning" in ended.stderr
