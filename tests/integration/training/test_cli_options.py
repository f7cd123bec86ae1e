"""The command line of a script: its help, its printed configuration, and its errors about unknown options."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from pytorch_lightning import Callback
from pytorch_lightning.cli import LightningCLI

import lightning_sm
from lightning_sm import SageMakerCLI
from lightning_sm.training.argument_parser import REPLACED_OPTIONS
from tests.fakes.small_app import SmallData, SmallModel

ARTICLE = [
    "--trainer.max_epochs=5",
    "--trainer.weights_save_path=logs/checkpoints",
    "--logger.save_dir=logs/tensorboard",
    "--logger.name=tutorial",
]


class Progress(Callback):
    """A user's callback that has the name of a class of the package."""


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Run a command line that exits, and return stdout, or stderr if it fails; names are not wrapped."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "ml"))
    monkeypatch.setenv("COLUMNS", "100000")
    monkeypatch.chdir(tmp_path)

    def run(*arguments, cli=SageMakerCLI, code=0):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        with pytest.raises(SystemExit) as end:
            cli(SmallModel, SmallData, seed_everything_default=1)
        assert end.value.code == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


def test_help_offers_only_public_classes(shown):
    """Help does not offer callbacks, loggers and plugins that a job adds automatically."""
    named = set(re.findall(r"\blightning_sm\.[\w.]+", shown("fit", "--help")))
    assert "lightning_sm.SpotCheckpoint" in named
    assert named <= {f"lightning_sm.{name}" for name in lightning_sm.__all__}


def test_help_shows_the_settings_of_the_data_service_after_all_other_options(shown):
    """Help lists the options of every run before those of a cluster with data hosts."""
    options = re.findall(r"^  (?:-\w.*, )?(--[\w.]+)", shown("fit", "--help"), re.MULTILINE)
    is_data = [option.startswith("--data_service") for option in options]
    assert any(is_data)
    assert is_data == sorted(is_data)


def test_a_short_name_means_the_callback_of_the_user(shown):
    """Classes of the package do not make the short name of a user's class ambiguous."""
    printed = yaml.safe_load(shown("fit", "--trainer.callbacks=Progress", "--print_config"))
    assert printed["trainer"]["callbacks"] == {"class_path": f"{__name__}.Progress"}


@pytest.mark.parametrize("before", [True, False])
def test_a_printed_configuration_is_one_of_lightning_cli(shown, tmp_path, before):
    """LightningCLI reads a printed configuration, whether it was printed for the script or for a subcommand."""
    arguments = ["--print_config", "fit"] if before else ["fit", "--print_config"]
    (tmp_path / "printed.yaml").write_text(shown(*arguments))
    read = (
        [f"--config={tmp_path / 'printed.yaml'}", "fit"] if before else ["fit", f"--config={tmp_path / 'printed.yaml'}"]
    )
    again = shown(*read, "--print_config", cli=LightningCLI)
    assert yaml.safe_load(again)["trainer"]["max_epochs"] is None


def test_a_printed_configuration_has_settings_of_the_data_service_that_were_set(shown, tmp_path):
    """A printed configuration includes changed settings of the data service, and can be read back."""
    (tmp_path / "printed.yaml").write_text(shown("fit", "--data_service.workers=3", "--print_config"))
    again = yaml.safe_load(shown("fit", f"--config={tmp_path / 'printed.yaml'}", "--print_config"))
    assert again["data_service"]["workers"] == 3


def test_an_option_that_was_replaced_is_answered_with_the_new_one(shown):
    """The error about unknown options ends with one line per replaced option that names its replacement."""
    told = shown("fit", *(f"--{option}=1" for option in REPLACED_OPTIONS), code=2)
    answers = [f"{option} is not an option here. Use {new}." for option, new in REPLACED_OPTIONS.items()]
    assert told.splitlines()[-len(answers) :] == answers


def test_a_key_that_was_replaced_is_answered_with_the_new_one(shown):
    """The error about a replaced key in a configuration file names its replacement."""
    Path("old.yaml").write_text("{trainer: {weights_save_path: there}}", encoding="utf-8")
    told = shown("fit", "--config=old.yaml", code=2)
    new = REPLACED_OPTIONS["trainer.weights_save_path"]
    assert told.endswith(f"trainer.weights_save_path is not an option here. Use {new}.\n")


def test_the_page_about_other_examples_has_each_option_that_was_replaced():
    """docs/other-examples.md lists each replaced option beside the same replacement."""
    rows = (Path(__file__).parents[3] / "docs" / "other-examples.md").read_text(encoding="utf-8").splitlines()
    for option, new in REPLACED_OPTIONS.items():
        of_option = [row for row in rows if re.search(rf"`(--)?{re.escape(option)}\b", row.split(" | ")[0])]
        assert of_option, option
        for name in re.findall(r"--[\w.]+", new):
            assert any(name.removeprefix("--") in row for row in of_option), (option, name)


def test_other_errors_have_no_answer(shown):
    """A value that happens to be the name of a replaced option is not mistaken for the option."""
    assert "not an option here" not in shown("fit", "--trainer.max_epochs=iterations", code=2)


def test_options_without_a_subcommand_are_answered_with_one(shown):
    """One error lists all problems of a command from an article about LightningCLI of Lightning 1."""
    told = shown(*ARTICLE, code=2)
    assert "Options must follow a subcommand (fit, validate, test, predict): train.py fit --OPTION ..." in told
    for option in ("trainer.weights_save_path", "logger.save_dir", "logger.name"):
        assert f"{option} is not an option here." in told
    assert "subcommand (" not in shown("fit", *ARTICLE, code=2)


def test_what_replaces_the_options_of_the_article_is_accepted(shown):
    """The suggested replacements give a configuration with the article's values."""
    new = [REPLACED_OPTIONS[name] for name in ("trainer.weights_save_path", "logger.save_dir", "logger.name")]
    words = [word.replace("FOLDER", "there").replace("NAME", "tutorial") for line in new for word in line.split()]
    trainer = yaml.safe_load(shown("fit", *words, "--trainer.logger.flush_secs=5", "--print_config"))["trainer"]
    logger = trainer["logger"]["init_args"]
    assert (logger["save_dir"], logger["name"], logger["flush_secs"]) == ("there", "tutorial", 5)
    assert trainer["callbacks"][0]["init_args"]["dirpath"] == "there"
    assert not Path("there").exists()
