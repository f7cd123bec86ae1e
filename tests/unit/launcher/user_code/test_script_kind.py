"""Which scripts have their command line read by SageMakerCLI alone."""

from __future__ import annotations

import sys

import pytest

from lightning_sm.launcher.user_code.script import Script
from lightning_sm.launcher.user_code.script_kind import Parser, parser_of

_CALL = "from lightning_sm import SageMakerCLI\nif __name__ == '__main__':\n    SageMakerCLI(Model)\n"


@pytest.mark.parametrize(
    "source",
    [
        _CALL,
        "import sys\n" + _CALL + "sys.exit(0)",
        "from lightning_sm import SageMakerCLI as CLI\ncli = CLI(Model, run=False)",
        "import lightning_sm\nlightning_sm.SageMakerCLI()",
        "import lightning_sm as sm\ndef main():\n    sm.SageMakerCLI()",
        "from lightning_sm import SageMakerCLI\nclass CLI(SageMakerCLI):\n    pass\nCLI()",
    ],
)
def test_a_script_of_the_cli(tmp_path, source):
    """A script that uses SageMakerCLI is recognised, under whatever name it imports it."""
    path = tmp_path / "train.py"
    path.write_text(source)
    assert parser_of(Script((sys.executable, "-u", str(path)), tmp_path)) is Parser.SAGEMAKER_CLI


@pytest.mark.parametrize(
    "source",
    [
        "",
        "from pytorch_lightning.cli import LightningCLI\nLightningCLI(Model)",
        "from lightning_sm import SageMakerTrainer\nSageMakerTrainer()",
        "import argparse\n" + _CALL,
        "import hydra\n" + _CALL,
        "from absl import app\n" + _CALL,
        "import sys\nprint(sys.argv)\n" + _CALL,
        "from sys import argv\n" + _CALL,
        "from lightning_sm import SageMakerCLI\nSageMakerCLI(Model, args=['fit'])",
        "def f(:",
        "\0",
    ],
)
def test_a_script_that_may_need_its_arguments(tmp_path, source):
    """A script needs its arguments if it does not use SageMakerCLI, or if other code may read the command line."""
    path = tmp_path / "train.py"
    path.write_text(source)
    assert parser_of(Script((sys.executable, "-u", str(path)), tmp_path)) is Parser.OTHER


def test_a_shell_script_needs_its_arguments(tmp_path):
    """A shell script needs its arguments, whatever it starts."""
    path = tmp_path / "run.sh"
    path.write_text(_CALL)
    assert parser_of(Script(("/bin/sh", str(path)), tmp_path)) is Parser.OTHER


@pytest.mark.parametrize(
    "source",
    [
        "import hydra\n@hydra.main(config_path='conf')\ndef main(config):\n    pass\nmain()",
        "import hydra, sys\nprint(sys.argv)\ndef f():\n    @hydra.main()\n    def main(config):\n        pass",
    ],
)
def test_a_script_of_hydra(tmp_path, source):
    """A script with a function that hydra.main decorates is a Hydra script."""
    path = tmp_path / "train.py"
    path.write_text(source)
    assert parser_of(Script((sys.executable, "-u", str(path)), tmp_path)) is Parser.HYDRA


@pytest.mark.parametrize(
    "source",
    [
        "import hydra\nhydra.initialize('conf')\nconfig = hydra.compose('x')",
        "import hydra\n@other.main()\ndef main(config):\n    pass",
        "from hydra.utils import instantiate",
    ],
)
def test_a_script_that_only_uses_hydra(tmp_path, source):
    """A script that only uses Hydra's API does not have its command line read by Hydra."""
    path = tmp_path / "train.py"
    path.write_text(source)
    assert parser_of(Script((sys.executable, "-u", str(path)), tmp_path)) is Parser.OTHER
