"""``lightning-sm train`` as the container runs it. The scripts do not use torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.launching import TIMEOUT_S, failure, train, variables_of

_ECHO = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), sys.path]))"


def test_success_leaves_no_failure_file(base, work):
    """The host of a successful script exits with 0 and writes no failure file."""
    (work / "train.py").write_text("print('done')")
    ended = train(base, work, "train.py")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert not (base / "output" / "failure").exists()


def test_banner_says_who_and_what(base, work):
    """The first line of the log names host, group, role, rank, versions, script and arguments."""
    (work / "train.py").write_text("")
    banner = train(base, work, "train.py", "fit", "--a=b c").stderr.splitlines()[0]
    for part in ("host algo-2", "group trainer", "role trainer", "node rank 1 of 2", "Python 3.", "lightning-sm 0."):
        assert part in banner
    assert banner.endswith(f"{work}/train.py fit '--a=b c'")


def test_data_hosts_start_the_same_script(base, work):
    """A data host runs the same script as the trainers, and has no rank."""
    groups = {"trainer": ["algo-1"], "data": ["algo-3"]}
    write_job(base, resource_config(groups, "algo-3", instance_types=dict.fromkeys(groups, "ml.m5.large")))
    (work / "train.py").write_text("print('served')")
    ended = train(base, work, "train.py")
    assert (ended.returncode, ended.stdout) == (0, "served\n")
    assert "role data |" in ended.stderr


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("raise ValueError('bad data')", 1, "ValueError: bad data\non trainer host algo-2 (exit code 1)\nFile "),
        ("import sys; sys.exit(7)", 7, "exit code 7 on trainer host algo-2; nothing was written to stderr"),
        ("import sys; sys.exit('no data')", 1, "exit code 1 on trainer host algo-2; last lines of stderr:\nno data"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "killed by SIGKILL (exit code 137) on trainer host algo-2; nothing was written to stderr",
        ),
        (
            "import argparse; argparse.ArgumentParser(prog='x').parse_args(['-b'])",
            2,
            "x: error: unrecognized arguments",
        ),
        ("def f(:", 1, "SyntaxError: invalid syntax\non trainer host algo-2 (exit code 1)\nFile "),
    ],
)
def test_exit_code_and_reason_of_a_failing_script(base, work, script, code, reason):
    """The host exits with the script's exit code, and its failure file starts with the error."""
    (work / "train.py").write_text(script)
    assert train(base, work, "train.py").returncode == code
    assert failure(base).startswith(reason)
    assert len(failure(base)) <= 1024


def test_the_failure_file_has_no_escape_sequences(base, work):
    """Escape sequences are removed: the failure file is shown in consoles and terminals, which would execute them."""
    (work / "train.py").write_text("raise ValueError('\\x1b]52;c;cGF5\\x07 bad\\x9b2J \\x1b[31mdata\\b\\x85')")
    assert train(base, work, "train.py").returncode == 1
    assert failure(base).startswith("ValueError:  bad data\non trainer host algo-2 (exit code 1)\n")


def test_failure_file_of_the_script_is_kept(base, work):
    """A failure file that the script wrote is not replaced."""
    (work / "train.py").write_text(
        "import os\nopen(os.environ['SAGEMAKER_BASE_DIR'] + '/output/failure', 'w').write('my own words')\n1 / 0"
    )
    (base / "output").mkdir()
    assert train(base, work, "train.py").returncode == 1
    assert failure(base) == "my own words"


def test_the_reason_of_an_earlier_job_is_removed(base, work):
    """A failure file that an earlier job left in a warm pool's container is removed, whether or not this job fails."""
    (base / "output").mkdir()
    for script, code in (("raise SystemExit(3)", 3), ("", 0)):
        (base / "output" / "failure").write_text("of another job")
        (work / "train.py").write_text(script)
        assert train(base, work, "train.py").returncode == code
        assert not (base / "output" / "failure").exists() or failure(base).startswith("exit code 3 ")


def test_a_host_that_is_alone_waits_for_nobody_when_it_fails(base, work):
    """A job's only host does not wait for other hosts when its script fails."""
    write_job(base, resource_config({"g": ["algo-1"]}, "algo-1"))
    reports = "from lightning_sm.job.failure_file import report_failures\nreport_failures()\n"
    (work / "train.py").write_text(f"{reports}raise BrokenPipeError('of nobody')")
    ended = train(base, work, "train.py", LIGHTNING_SM_PEERS_TIMEOUT_S="86400")
    assert ended.returncode == 1
    assert failure(base).startswith("BrokenPipeError: of nobody")
    assert ended.stderr.count("raise BrokenPipeError('of nobody')\n") == 1


def test_a_bug_in_the_launcher_leaves_its_reason(base, work):
    """If the launcher itself fails, the host exits with 1, writes a failure file and logs the traceback."""
    code = (
        "import sys, lightning_sm.launcher.script_command as command, lightning_sm.launcher.train as launcher\n"
        "command._banner = lambda *_: 1 / 0\n"
        "sys.exit(launcher.train('train.py', []))\n"
    )
    (work / "train.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=work,
        env=variables_of(base),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert failure(base) == "The launcher failed: ZeroDivisionError: division by zero\non trainer host algo-2"


def test_unwritable_failure_file_does_not_mask_the_error(base, work):
    """If the failure file cannot be written, the host still exits with the script's code and logs the reason."""
    (base / "output").write_text("a file where a folder should be")
    (work / "train.py").write_text("raise SystemExit(5)")
    ended = train(base, work, "train.py")
    assert ended.returncode == 5
    assert "lightning-sm: cannot write " in ended.stderr


def test_output_that_is_not_text_passes(base, work):
    """Bytes that are not UTF-8 reach stderr unchanged and do not break the failure file."""
    (work / "train.py").write_text("import os\nos.write(2, b'\\xff\\xfe oops\\n')\nraise SystemExit(3)")
    ended = train(base, work, "train.py")
    assert ended.returncode == 3
    assert "\ufffd\ufffd oops" in ended.stderr
    assert "\ufffd\ufffd oops" in failure(base)


def test_much_output_reaches_stderr_in_full(base, work):
    """Stderr is copied in full, although the failure file keeps only the last lines."""
    (work / "train.py").write_text(
        "import sys\nfor i in range(100000): print(i, file=sys.stderr)\nraise KeyError('end')"
    )
    ended = train(base, work, "train.py")
    assert "\n0\n1\n" in ended.stderr
    assert "\n99999\n" in ended.stderr
    assert failure(base).startswith("KeyError: 'end'")


def test_hyperparameters_become_arguments(base, work):
    """Arguments from the command line come first, then the sorted hyperparameters except those for the toolkit."""
    write_job(base, hyperparameters={"trainer.max_epochs": "3", "data.size": "8", "sagemaker_region": "eu"})
    (work / "train.py").write_text(_ECHO)
    ended = train(base, work, "train.py", "fit", "--seed=1")
    argv, directory, path = json.loads(ended.stdout)
    assert argv == ["fit", "--seed=1", "--data.size=8", "--trainer.max_epochs=3"]
    assert directory == str(work)
    assert path[0] == str(work)


@pytest.mark.matrix
@pytest.mark.parametrize("value", ["fit", '"fit"'])
@pytest.mark.parametrize("args", [[], ["fit"]])
def test_subcommand_is_passed_once(base, work, value, args):
    """The hyperparameter ``subcommand`` comes first, and is not repeated if the command line has it."""
    write_job(base, hyperparameters={"subcommand": value, "a": "1"})
    (work / "train.py").write_text(_ECHO)
    assert json.loads(train(base, work, "train.py", *args).stdout)[0] == ["fit", "--a=1"]


def test_subcommand_comes_before_options_of_the_command_line(base, work):
    """The subcommand comes before options from the command line, because LightningCLI requires it."""
    write_job(base, hyperparameters={"subcommand": "fit", "a": "1"})
    (work / "train.py").write_text(_ECHO)
    assert json.loads(train(base, work, "train.py", "--b=2").stdout)[0] == ["fit", "--b=2", "--a=1"]


def test_a_distribution_of_the_sdk_sets_the_devices(base, work):
    """distribution={"mpi": ...} sets LIGHTNING_SM_DEVICES and the number of ranks, and one line logs it."""
    asked = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2"}
    write_job(base, hyperparameters=asked)
    (work / "train.py").write_text("import os\nos.write(1, os.environ['LIGHTNING_SM_DEVICES'].encode() + b'\\n')")
    ended = train(base, work, "train.py")
    assert ended.stdout == "2\n2\n"
    assert ended.stderr.count("This launcher starts the same ranks itself: 2 on each trainer host.") == 1


def test_all_hosts_hash_strings_alike(base, work, monkeypatch):
    """PYTHONHASHSEED is 0, so that sets of strings have the same order in all processes, unless the user sets it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    write_job(base)
    (work / "train.py").write_text("import os\nprint(os.environ['PYTHONHASHSEED'], [hash('a'), hash('b')])")
    first, second = (train(base, work, "train.py").stdout for _ in range(2))
    assert first == second
    assert first.startswith("0 [")
    assert train(base, work, "train.py", PYTHONHASHSEED="7").stdout.startswith("7 [")


def test_a_distribution_on_a_data_group_is_refused(base, work):
    """A distribution on a data group is refused before the script starts."""
    write_job(base, hyperparameters={"sagemaker_distribution_instance_groups": '["data"]'})
    (work / "train.py").write_text("print('started')")
    ended = train(base, work, "train.py")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert failure(base).startswith("TopologyError: distribution={...} names the instance groups ['data']")


def test_two_different_subcommands_are_refused(base, work):
    """If the command line and the hyperparameters have different subcommands, the error names both."""
    write_job(base, hyperparameters={"subcommand": "fit"})
    (work / "train.py").write_text(_ECHO)
    ended = train(base, work, "train.py", "validate")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'fit'" in ended.stderr
    assert "'validate'" in ended.stderr
    assert failure(base).startswith("HyperparameterError: ")


@pytest.fixture
def config_channel(base):
    """A ``config`` channel with two config files and a file of another kind."""
    write_job(base, channels={"config": {"TrainingInputMode": "File"}})
    folder = base / "input" / "data" / "config"
    folder.mkdir(parents=True)
    for name in ("b.yaml", "a.json", "notes.txt"):
        (folder / name).write_text("{}")
    return folder


def test_files_of_the_config_channel_become_config_options(base, work, config_channel):
    """All config files of the channel are passed, sorted, before the other options."""
    write_job(base, hyperparameters={"subcommand": "fit", "x": "1"})
    (work / "train.py").write_text(_ECHO)
    argv = json.loads(train(base, work, "train.py").stdout)[0]
    assert argv == ["fit", f"--config={config_channel}/a.json", f"--config={config_channel}/b.yaml", "--x=1"]


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("value", ["b.yaml", '"b.yaml"', '["b.yaml"]'])
def test_config_hyperparameter_chooses_a_file_of_the_channel(base, work, config_channel, value):
    """A config that exists only in the channel is read from there, and the channel's other files are not passed."""
    write_job(base, hyperparameters={"config": value, "x": "1"})
    (work / "train.py").write_text(_ECHO)
    assert json.loads(train(base, work, "train.py").stdout)[0] == [f"--config={config_channel}/b.yaml", "--x=1"]


def test_config_hyperparameter_prefers_the_working_directory(base, work, config_channel):
    """A config in the script's working directory is passed unchanged, after the channel's files."""
    write_job(base, hyperparameters={"config": "b.yaml"})
    (work / "b.yaml").write_text("{}")
    (work / "train.py").write_text(_ECHO)
    argv = json.loads(train(base, work, "train.py").stdout)[0]
    assert argv[-1] == "--config=b.yaml"
    assert len(argv) == 3


@pytest.mark.parametrize("source", ["variable", "hyperparameter", "quoted hyperparameter"])
def test_script_can_be_named_as_sagemaker_does(base, work, source):
    """Without an argument, SAGEMAKER_PROGRAM or the hyperparameter sagemaker_program names the script."""
    (work / "train.py").write_text("print('found')")
    variables = {"SAGEMAKER_PROGRAM": "train.py"} if source == "variable" else {}
    if source != "variable":
        write_job(base, hyperparameters={"sagemaker_program": '"train.py"' if "quoted" in source else "train.py"})
    assert train(base, work, **variables).stdout == "found\n"


@pytest.mark.parametrize("place", ["working directory", "submit directory", "code directory"])
def test_script_in_a_package_imports_its_package(base, work, tmp_path, place):
    """A script runs in the folder that its path is relative to, and can import its package from there."""
    folder = {"working directory": work, "submit directory": tmp_path / "src", "code directory": base / "code"}[place]
    (folder / "project").mkdir(parents=True)
    (folder / "project" / "__init__.py").write_text("")
    (folder / "project" / "model.py").write_text("X = 42")
    (folder / "project" / "train.py").write_text("import os\nfrom project.model import X\nprint(X, os.getcwd())")
    variables = {"SAGEMAKER_SUBMIT_DIRECTORY": str(folder)} if place == "submit directory" else {}
    assert train(base, work, "project/train.py", **variables).stdout == f"42 {folder}\n"


def test_missing_script_names_everything_tried(base, work, tmp_path):
    """If the script is missing, the host exits with 2 and names every path that it tried."""
    ended = train(base, work, "nix/train.py", SAGEMAKER_SUBMIT_DIRECTORY=str(tmp_path / "src"))
    assert ended.returncode == 2
    for folder in (work, tmp_path / "src", base / "code"):
        assert f"{folder}/nix/train.py" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert failure(base).startswith("ScriptError: The training script 'nix/train.py' does not exist.")


@pytest.mark.parametrize(
    ("args", "message"), [(["notes.txt"], "is not a Python file"), ([], "No training script was given")]
)
def test_unusable_script_is_refused(base, work, args, message):
    """A file that is not a script, or no script at all, is an error with an explanation."""
    (work / "notes.txt").write_text("to do")
    ended = train(base, work, *args)
    assert ended.returncode == 2
    assert message in ended.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGHTNING_SM_PEERS_TIMEOUT_S", "inf"),
        ("LIGHTNING_SM_PREPARE_S", "0"),
        ("LIGHTNING_SM_STOP_SCHEDULE", "95,1e10"),
        ("LIGHTNING_SM_INSTALL_REQUIREMENTS", "maybe"),
    ],
)
def test_wrong_setting_ends_the_host_before_the_script(base, work, tmp_path, name, value):
    """An invalid setting fails the host before the script starts, the error quotes it, and no folder stays behind."""
    (work / "train.py").write_text("print('started')\nraise SystemExit(5)")
    (temporary := tmp_path / "temporary").mkdir()
    ended = train(base, work, "train.py", **{name: value, "TMPDIR": str(temporary)})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert failure(base).startswith(f"JobConfigError: {name}={value!r}: expected ")
    assert "Traceback" not in ended.stderr
    assert not [*temporary.iterdir()]


def test_outside_of_sagemaker_the_emulator_is_named(tmp_path, work):
    """Off SageMaker, the command fails with a hint to use the emulator, and creates no files."""
    ended = train(tmp_path / "ml", work, "train.py")
    assert ended.returncode == 2
    assert "not a SageMaker host" in ended.stderr
    assert "lightning-sm local" in ended.stderr
    assert not (tmp_path / "ml").exists()


def test_malformed_files_of_the_service_are_reported(base, work):
    """The failure file names a malformed resourceconfig.json."""
    write_job(base, resources="{not json")
    ended = train(base, work, "train.py")
    assert ended.returncode == 2
    assert failure(base).startswith("JobConfigError: ")
    assert "resourceconfig.json" in failure(base)


@pytest.mark.parametrize(
    "module", ["lightning_sm.__main__", "lightning_sm.launcher.train", "lightning_sm.emulator.runner"]
)
def test_torch_and_lightning_are_not_imported(module):
    """Launcher and emulator do not import torch or Lightning, which would take seconds."""
    code = f"import sys, {module}\nprint({{'torch', 'pytorch_lightning', 'lightning'}} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert ended.stdout == "set()\n"
