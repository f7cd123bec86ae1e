"""The example app's command line: help, data by name, configurations, and a run from fit to predict."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from app import train, train_text

REPOSITORY = Path(train.__file__).parent.parent
CONFIGS = sorted((REPOSITORY / "app" / "configs").glob("*.yaml"))
# Configurations for train_text.py, which selects checkpoints by val_loss. All others are for train.py and val_acc.
OF_TEXT = {"hybrid.yaml", "transformer.yaml"}
# Partial configurations, and the file that each one extends.
BELOW = {"hybrid.yaml": "transformer.yaml"}
SMOKE = str(REPOSITORY / "app" / "configs" / "smoke.yaml")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command line within this process, in an empty folder, and return its exit status."""
    monkeypatch.chdir(tmp_path)
    # Lightning sets these variables; monkeypatch removes them after the test.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")

    def run_with(*arguments, script=train):
        monkeypatch.setattr(sys, "argv", [script.__file__, *arguments])
        try:
            script.main()
        except SystemExit as leave:
            return leave.code or 0
        return 0

    return run_with


def printed_config(run, capsys, *arguments, script=train):
    """Return the configuration that ``--print_config`` prints for the arguments."""
    assert run("fit", *arguments, "--print_config", script=script) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_help_names_the_task_and_the_commands(run, capsys):
    """The help page names the task and has complete command lines to copy."""
    assert run("--help") == 0
    page = capsys.readouterr().out
    assert "Train ResNet-18 to classify small images" in page
    for line in (
        "  python app/train.py fit --config app/configs/digits.yaml\n",
        "  lightning-sm local --group trainer=2 -- app/train.py fit --config app/configs/digits.yaml\n",
    ):
        assert line in page


def test_help_of_fit_explains_every_argument_of_the_model(run, capsys):
    """The help explains the model's arguments, and links the number of classes to the data."""
    assert run("fit", "--help") == 0
    page = capsys.readouterr().out
    assert "Highest learning rate of the run." in page
    assert "data.num_classes --> model.num_classes" in page


def test_digits_are_the_default_data(run, capsys):
    """The default data are scikit-learn's digits."""
    data = printed_config(run, capsys)["data"]
    assert data["class_path"] == "app.digits.DigitsDataModule"
    assert data["init_args"]["data_dir"] is None


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_each_configuration_is_accepted(run, capsys, config):
    """Each file in app/configs parses, keeps the best and the last checkpoint, and has no absolute path."""
    is_text = config.name in OF_TEXT
    below = [config.with_name(BELOW[config.name])] if config.name in BELOW else []
    options = [option for path in (*below, config) for option in ("--config", str(path))]
    settings = printed_config(run, capsys, *options, script=train_text if is_text else train)
    checkpoints = settings["trainer"]["callbacks"][0]["init_args"]
    chosen_by = ("val_loss", "min") if is_text else ("val_acc", "max")
    assert (checkpoints["monitor"], checkpoints["mode"], checkpoints["save_last"]) == (*chosen_by, True)
    assert ": /" not in config.read_text()


def test_from_fit_to_predict(run, tmp_path, capsys):
    """Validate, test and predict load the checkpoint of a fit, including the model's arguments."""
    smoke = ["--config", SMOKE, "--trainer.accelerator", "cpu"]
    assert run("fit", *smoke, "--model.norm", "group") == 0
    (last,) = tmp_path.rglob("last.ckpt")
    capsys.readouterr()
    for subcommand in ("validate", "test", "predict"):
        assert run(subcommand, *smoke, "--trainer.logger", "false", "--ckpt_path", str(last)) == 0
    assert "test_acc" in capsys.readouterr().out


def test_text_from_fit_to_predict(run, tmp_path, capsys):
    """The language model gets tokens and context from the data, and all commands load its checkpoint."""
    few = ["--config", str(REPOSITORY / "app" / "configs" / "transformer.yaml"), "--trainer.accelerator", "cpu"]
    few += ["--data.context", "16"]
    few += [f"--trainer.limit_{stage}_batches=2" for stage in ("val", "test", "predict")]
    fit = ["--model.width", "16", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "4"]
    assert run("fit", *few, *fit, script=train_text) == 0
    (last,) = tmp_path.rglob("last.ckpt")
    capsys.readouterr()
    for subcommand in ("validate", "test", "predict"):
        given = [*few, "--model.width", "16", "--trainer.logger", "false", "--ckpt_path", str(last)]
        assert run(subcommand, *given, script=train_text) == 0
    assert "test_loss" in capsys.readouterr().out


@pytest.mark.filterwarnings("default")  # pytest.warns re-emits Lightning's other warnings
def test_an_optimizer_on_the_command_line_replaces_the_own_one(run, tmp_path):
    """LightningCLI's --optimizer overrides the model's optimizer."""
    smoke = ["--config", SMOKE, "--trainer.accelerator", "cpu", "--trainer.fast_dev_run", "true"]
    with pytest.warns(UserWarning, match="configure_optimizers` will be overridden"):
        assert run("fit", *smoke, "--optimizer", "SGD", "--optimizer.lr", "0.01") == 0


@pytest.mark.proof
@pytest.mark.processes
def test_the_script_runs_from_any_folder_in_two_processes(tmp_path):
    """Every process imports the app's modules if the script is started outside the repository without PYTHONPATH."""
    command = [sys.executable, str(REPOSITORY / "app" / "train.py"), "fit", "--config", SMOKE]
    options = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "distributed_backend=gloo" in result.stderr + result.stdout
    assert list(tmp_path.rglob("last.ckpt"))


@pytest.mark.proof
@pytest.mark.processes
def test_lightning_bolts_is_imported_only_when_it_is_used():
    """The command line, including its help, does not import lightning-bolts."""
    code = "import sys, app.train; sys.exit('pl_bolts' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=120, check=True)


@pytest.mark.proof
@pytest.mark.processes
def test_data_is_chosen_by_name():
    """``--data`` accepts a class name, and arguments that are not given keep their defaults."""
    # In a new process: other tests import lightning-bolts, which has a class of the same name.
    command = [sys.executable, "app/train.py", "fit", "--data", "CIFAR10DataModule", "--data.val_split", "100"]
    result = subprocess.run(
        [*command, "--print_config"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    data = yaml.safe_load(result.stdout)["data"]
    assert data["class_path"] == "app.cifar10.CIFAR10DataModule"
    assert data["init_args"] == {
        "data_dir": None,
        "batch_size": 32,
        "num_workers": 0,
        "val_split": 100,
        "augment": True,
    }
