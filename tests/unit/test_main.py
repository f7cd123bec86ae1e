"""The command line: ``lightning-sm settings``, and what the commands load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_sm.__main__ import main
from lightning_sm.job.variables import PREFIX, SETTINGS, USER_SETTINGS


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)


def _shown(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[0] for line in lines if line.startswith(PREFIX)]


@pytest.mark.parametrize(("args", "settings"), [([], USER_SETTINGS), (["--all"], SETTINGS)])
def test_settings_shows_the_table(capsys, args, settings):
    """One row for each setting, in the order of the table; internal ones on request."""
    assert main(["settings", *args]) == 0
    assert _shown(capsys) == [setting.name for setting in settings]


def test_settings_shows_the_values_here(capsys, monkeypatch):
    """A value that looks like a number keeps its text, and an empty one is visible."""
    monkeypatch.setenv("LIGHTNING_SM_STOP_SCHEDULE", "10,110")
    monkeypatch.setenv("LIGHTNING_SM_DATA_GROUPS", "")
    assert main(["settings"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(PREFIX)}
    assert rows["LIGHTNING_SM_STOP_SCHEDULE"][1:3] == ["10,110", "95,110"]
    assert rows["LIGHTNING_SM_DATA_GROUPS"][1] == "(empty)"


def test_settings_hides_the_secret(capsys, monkeypatch, caplog):
    """A secret is shown as set, neither its value nor, if it is wrong, what is wrong about it in clear."""
    for secret, exit_code in (("0123456789abcdef" * 4, 0), ("hunter2", 2)):
        monkeypatch.setenv("LIGHTNING_SM_JOB_SECRET", secret)
        with caplog.at_level("ERROR", "lightning_sm"):
            assert main(["settings"]) == exit_code
        output = capsys.readouterr()
        assert "(hidden)" in output.out
        assert secret[:7] not in output.out + output.err + caplog.text


def test_settings_fails_for_wrong_values(capsys, monkeypatch, caplog):
    """The table is shown all the same, and each wrong value is an error."""
    monkeypatch.setenv("LIGHTNING_SM_DEVICES", "0")
    monkeypatch.setenv("LIGHTNING_SM_PREPARE_S", "soon")
    with caplog.at_level("ERROR", "lightning_sm"):
        assert main(["settings"]) == 2
    output = capsys.readouterr()
    assert "LIGHTNING_SM_MAIN_PORT" in output.out
    errors = caplog.text + output.err
    assert "LIGHTNING_SM_DEVICES='0': expected a whole number from 1 to 1024." in errors
    assert "LIGHTNING_SM_PREPARE_S='soon': expected a number of seconds, 0 or more." in errors


@pytest.mark.parametrize("argument", ["settings", "--help"])
def test_commands_start_without_torch(argument):
    """Torch, Lightning and the SDK take seconds to load."""
    code = (
        "import sys\nfrom lightning_sm.__main__ import main\n"
        f"try:\n    main([{argument!r}])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'pytorch_lightning', 'lightning', 'grpc', 'sagemaker', 'boto3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tpo"], "unknown command tpo. Did you mean top?"),
        (["dokter"], "unknown command dokter. Did you mean doctor?"),
        (["xyzzy"], "unknown command xyzzy.\n"),
        (["--versoin"], "unknown option --versoin. Did you mean --version?"),
        (["top", "--onec"], "lightning-sm top: error: unknown option --onec. Did you mean --once?"),
        (["local", "--groups", "trainer=2", "--", "a.py"], "unknown option --groups. Did you mean --group?"),
        (["doctor", "now"], "lightning-sm doctor: error: unexpected arguments: now"),
        (["completion", "fish"], "invalid choice: 'fish'"),
    ],
)
def test_an_unknown_word_is_answered_with_a_similar_one(capsys, args, words):
    """Commands and options, those of the subcommand that was named; with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_no_command_is_a_question_for_help(capsys):
    """The list of commands, on stdout, and no error."""
    assert main([]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("usage: lightning-sm ")
    assert "watch a running job" in output.out
    assert output.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["train.py", "--group", "trainer=2"],
            ["lightning-sm local --group ... -- train.py", "local -- train.py --group"],
        ),
        (
            ["--seed", "1", "train.py", "fit", "--devices=2"],
            ["--devices=2 is behind train.py", "-- train.py fit --devices=2"],
        ),
    ],
)
def test_own_options_behind_the_script_are_no_guess(caplog, args, words):
    """Without "--", the script would get them, and the emulator would start one host."""
    with caplog.at_level("ERROR", "lightning_sm"):
        assert main(["local", *args]) == 2
    for word in words:
        assert word in caplog.text


@pytest.mark.parametrize("every", ["abc", "nan", "0.1", "3601"])
def test_top_updates_at_a_sensible_interval(capsys, every):
    """Another one is an error with the limits."""
    with pytest.raises(SystemExit) as ended:
        main(["top", "--every", every])
    assert ended.value.code == 2
    assert f"argument --every: {every}: expected 0.2 to 3600 seconds" in capsys.readouterr().err
