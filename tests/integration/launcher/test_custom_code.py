"""How ``lightning-sm train`` finds, fetches and runs the user's code."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.s3 import fake_s3
from tests.integration.launching import TIMEOUT_S, failure, local_addresses, started, train

_ADDRESS = "s3://bucket/job/sourcedir.tar.gz"
_PATH = "/bucket/job/sourcedir.tar.gz"
# SDK v2 sends JSON.
_SUBMITTED = {"sagemaker_program": '"train.py"', "sagemaker_submit_directory": f'"{_ADDRESS}"'}
_WHO = "import os\nprint({who!r}, os.getcwd())"


@pytest.fixture
def base(tmp_path):
    """A job with one host."""
    return write_job(tmp_path / "ml", resource_config({"homogeneousCluster": ["algo-1"]}, "algo-1"))


@pytest.fixture
def work(tmp_path):
    """The container's working directory, next to a folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def s3():
    """A fake S3 server."""
    with fake_s3() as store:
        yield store


def _archive(files):
    """Build a sourcedir.tar.gz like the one that SDK v2 uploads."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(content, tarfile.TarInfo) else content.encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _submit(base, s3, files, **hyperparameters):
    s3.objects[_PATH] = _archive(files)
    write_job(base, hyperparameters={**_SUBMITTED, **hyperparameters})


def _run(base, work, s3, *args, **variables):
    return train(base, work, *args, **s3.variables, TMPDIR=str(work.parent / "tmp"), **variables)


def test_code_in_s3_is_unpacked_and_run(base, work, s3):
    """A script from the job's source_dir runs in /opt/ml/code and can import the packages next to it."""
    files = {"train.py": "import os\nfrom nets.model import X\nprint(X, os.getcwd())", "nets/model.py": "X = 42"}
    _submit(base, s3, files)
    ended = _run(base, work, s3)
    assert (ended.returncode, ended.stdout) == (0, f"42 {base}/code\n"), ended.stderr
    assert f"{_ADDRESS} (hyperparameter sagemaker_submit_directory), into {base}/code." in ended.stderr


def test_a_script_in_a_subfolder_of_the_source_dir(base, work, s3):
    """entry_point="jobs/train.py" runs from the root of the source_dir."""
    _submit(base, s3, {"jobs/train.py": _WHO.format(who="jobs")}, sagemaker_program='"jobs/train.py"')
    assert _run(base, work, s3).stdout == f"jobs {base}/code\n"


def test_the_address_may_come_from_a_variable(base, work, s3):
    """SAGEMAKER_SUBMIT_DIRECTORY names the archive, and SAGEMAKER_PROGRAM the script in it."""
    s3.objects[_PATH] = _archive({"train.py": _WHO.format(who="variable")})
    ended = _run(base, work, s3, SAGEMAKER_PROGRAM="train.py", SAGEMAKER_SUBMIT_DIRECTORY=_ADDRESS)
    assert ended.stdout == f"variable {base}/code\n"


def test_an_archive_on_this_machine(base, work, tmp_path, s3):
    """sagemaker_submit_directory may be the path of an archive."""
    path = tmp_path / "code.tar.gz"
    path.write_bytes(_archive({"train.py": _WHO.format(who="path")}))
    write_job(base, hyperparameters={**_SUBMITTED, "sagemaker_submit_directory": json.dumps(str(path))})
    assert _run(base, work, s3).stdout == f"path {base}/code\n"


def test_the_jobs_code_comes_before_that_of_the_image(base, work, s3):
    """The job's code takes precedence over a script in /opt/ml/code and over the image's SAGEMAKER_PROGRAM."""
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text(_WHO.format(who="image"))
    (work / "train.py").write_text(_WHO.format(who="work"))
    _submit(base, s3, {"train.py": _WHO.format(who="job")})
    ended = _run(base, work, s3, SAGEMAKER_PROGRAM="app/train.py")
    who, folder = ended.stdout.split()
    assert who == "job"
    assert Path(folder).parent == work.parent / "tmp"
    assert f", into {folder}." in ended.stderr


def test_a_script_of_the_same_name_in_the_image_is_no_substitute(base, work, s3):
    """If the job's code lacks the entry point, the host fails instead of running the image's script."""
    (work / "train.py").write_text(_WHO.format(who="image"))
    _submit(base, s3, {"other.py": ""})
    ended = _run(base, work, s3)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"Tried: {base}/code/train.py." in failure(base)


def test_the_command_line_comes_first(base, work, s3):
    """A script on the command line overrides the hyperparameter, and is run from the job's code."""
    _submit(base, s3, {"train.py": _WHO.format(who="hyperparameter"), "other.py": _WHO.format(who="line")})
    ended = _run(base, work, s3, "other.py")
    assert ended.stdout == f"line {base}/code\n"


def test_the_script_of_the_image_may_use_code_of_the_job(base, work, s3):
    """If the job sets no entry_point, the image's script runs and imports the job's modules before the image's."""
    (work / "train.py").write_text("import nets\nprint(nets.WHO)")
    (work / "app").mkdir()
    (work / "app" / "train.py").write_text("import os, nets\nprint(nets.WHO, os.getcwd())")
    (work / "nets.py").write_text("WHO = 'image'")
    _submit(base, s3, {"nets.py": "WHO = 'job'"})
    write_job(base, hyperparameters={"sagemaker_submit_directory": _SUBMITTED["sagemaker_submit_directory"]})
    assert _run(base, work, s3, SAGEMAKER_PROGRAM="app/train.py").stdout == f"job {work}\n"


def test_another_start_in_the_same_container_runs_the_code_of_its_job(base, work, s3):
    """A second job in the same container runs its own code, not the code that the first job unpacked."""
    _submit(base, s3, {"train.py": "print('first')", "old.py": ""})
    assert _run(base, work, s3).stdout == "first\n"
    _submit(base, s3, {"train.py": "import os\nprint('second', os.path.exists('old.py'))"})
    assert _run(base, work, s3).stdout == "second False\n"
    assert _run(base, work, s3).stdout == "second False\n"


def test_local_code_is_run_where_it_is_mounted(base, work, s3):
    """Nothing is fetched in SDK v2's local_code mode, which submits /opt/ml/code as the code's location."""
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text(_WHO.format(who="mounted"))
    (work / "train.py").write_text(_WHO.format(who="image"))
    write_job(base, hyperparameters={**_SUBMITTED, "sagemaker_submit_directory": '"/opt/ml/code"'})
    assert _run(base, work, s3).stdout == f"mounted {base}/code\n"
    assert s3.requests == []


def test_code_that_is_nowhere_is_an_error(base, work, s3):
    """The error for a missing submit directory names the directory and the hyperparameter that set it."""
    write_job(base, hyperparameters={**_SUBMITTED, "sagemaker_submit_directory": '"/nowhere"'})
    assert _run(base, work, s3).returncode == 2
    assert "hyperparameter sagemaker_submit_directory says that the code is at '/nowhere'" in failure(base)


def test_errors_of_the_server_are_survived(base, work, s3):
    """A failed request to S3 is retried."""
    _submit(base, s3, {"train.py": "print('here')"})
    s3.failures = 2
    assert _run(base, work, s3).stdout == "here\n"


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize(
    ("content", "address", "reason"),
    [
        (None, _ADDRESS, "404"),
        (b"no archive", _ADDRESS, "Cannot unpack"),
        (_archive({"train.py": "print('cut off')" * 999})[:100], _ADDRESS, "Cannot unpack"),
        (_archive({"../evil.py": ""}), _ADDRESS, "outside the destination"),
        (b"", "s3://bucket", "expected s3://bucket/key"),
        (b"", "https://example.com/code.tar.gz", "expected s3://bucket/key"),
    ],
    ids=["missing", "not an archive", "cut off", "outside", "no key", "not S3"],
)
def test_code_that_cannot_be_had_fails_the_host(base, work, s3, content, address, reason):
    """The failure file names the address and the problem, and no script is started."""
    if content is not None:
        s3.objects[_PATH] = content
    write_job(base, hyperparameters={**_SUBMITTED, "sagemaker_submit_directory": json.dumps(address)})
    ended = _run(base, work, s3)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert failure(base).startswith("ScriptError: ")
    assert address in failure(base)
    assert reason in failure(base)
    assert not (base / "evil.py").exists()


def test_without_boto3_the_error_says_what_to_install(base, work, tmp_path, s3):
    """An image without boto3 cannot fetch code: the error names the missing package."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "boto3.py").write_text("raise ImportError('no boto3 here')")
    _submit(base, s3, {"train.py": ""})
    assert _run(base, work, s3, PYTHONPATH=str(tmp_path / "site")).returncode == 2
    assert "boto3 is not installed in the image (no boto3 here)" in failure(base)


def test_a_stop_ends_a_host_that_fetches_code(base, work, s3):
    """SIGTERM stops a host that is waiting for S3: it exits with 143, and the reason names what it was fetching."""
    _submit(base, s3, {"train.py": ""})
    s3.objects[_PATH] = None
    with started(base, work, **s3.variables) as running:
        running.wait_for(f"unpacking the job's code, {_ADDRESS}")
        assert s3.asked.wait(TIMEOUT_S)
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 143
    assert failure(base) == f"The job was stopped or interrupted (SIGTERM). This host was fetching {_ADDRESS}."


def test_a_data_host_that_is_stopped_before_its_script_is_not_broken(tmp_path, work, s3):
    """A data host that is stopped before its script starts exits with 0, as it does once the script runs."""
    groups = {"trainer": ["algo-1"], "data": ["algo-2"]}
    base = write_job(tmp_path / "ml", resource_config(groups, "algo-2", interface="lo"))
    _submit(base, s3, {"train.py": ""})
    s3.objects[_PATH] = None
    with started(base, work, **s3.variables, **local_addresses("algo-1", "algo-2")) as running:
        assert s3.asked.wait(TIMEOUT_S)
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 0
    assert not (base / "output" / "failure").exists()


def test_fetching_has_a_time_limit(base, work, s3):
    """The host fails after LIGHTNING_SM_PREPARE_S, and the reason names what it was waiting for."""
    _submit(base, s3, {"train.py": ""})
    s3.objects[_PATH] = None
    assert _run(base, work, s3, LIGHTNING_SM_PREPARE_S="2").returncode == 2
    assert f"Timeout: fetching {_ADDRESS} took longer than 2 s (LIGHTNING_SM_PREPARE_S)." in failure(base)


_SHELL = 'printf "%s|" "$0" "$@"; echo "$SM_HP_NAME|$(pwd)"; exit 7\n'


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize("first_line", ["", "#!/bin/sh\n", "#!/usr/bin/env bash\n", "#! /bin/bash -e\n"])
def test_shell_scripts_run_with_arguments_and_exit_code(base, work, first_line):
    """A shell script needs no execute permission, gets its arguments unchanged and sets the host's exit code."""
    (work / "run.sh").write_text(first_line + _SHELL)
    write_job(base, hyperparameters={"name": "a b $HOME 'c'"})
    ended = train(base, work, "run.sh", "fit")
    assert ended.returncode == 7
    assert ended.stdout == f"{work}/run.sh|fit|--name=a b $HOME 'c'|a b $HOME 'c'|{work}\n"


def test_a_first_line_names_any_interpreter(base, work):
    """A script without a suffix runs with the interpreter in its first line; a binary runs directly."""
    (work / "job").write_text(f"#!{sys.executable}\nprint('python')")
    (work / "true").write_bytes(Path("/bin/true").read_bytes())
    (work / "true").chmod(stat.S_IRWXU)
    assert train(base, work, "job").stdout == "python\n"
    assert train(base, work, "true").returncode == 0


def test_a_shell_script_passes_arguments_on_to_python(base, work):
    """A shell script can pass its arguments to Python with ``python train.py "$@"``."""
    (work / "train.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))")
    (work / "run.sh").write_text(f'exec {sys.executable} train.py "$@"')
    write_job(base, hyperparameters={"subcommand": "fit", "data.path": "a b", "list": "[1, 2]"})
    assert json.loads(train(base, work, "run.sh").stdout) == ["fit", "--data.path=a b", "--list=[1, 2]"]


@pytest.mark.parametrize(("name", "first_line"), [("run.sh", ""), ("run", "#!/usr/bin/env sh\n")])
def test_the_emulator_runs_shell_scripts(tmp_path, work, name, first_line):
    """``lightning-sm local -- run.sh`` runs the shell script on every host."""
    (work / name).write_text(first_line + 'echo "$SM_CURRENT_HOST got $1"')
    command = ["local", "--group", "trainer=2", "--base-dir", str(tmp_path / "jobs"), "--", name, "fit"]
    ended = subprocess.run(
        [sys.executable, "-m", "lightning_sm", *command],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout
    for host in ("algo-1", "algo-2"):
        assert f"{host} | {host} got fit" in ended.stdout


def test_signals_reach_what_a_shell_script_started(base, work):
    """SIGTERM reaches the shell script's Python process, and the shell script chooses the exit code."""
    (work / "train.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('leaves', flush=True)))\n"
        f"print('ready', flush=True)\ntime.sleep({TIMEOUT_S})"
    )
    (work / "run.sh").write_text(f"trap 'wait; exit 9' TERM\n{sys.executable} train.py &\nwait\n")
    with started(base, work, "run.sh") as running:
        running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("leaves")
        assert running.exit_code() == 9


def test_code_where_sdk_v3_puts_it_is_found(base, work):
    """SourceCode(command="lightning-sm train train.py") finds the script in the code channel."""
    folder = base / "input" / "data" / "code"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(_WHO.format(who="v3"))
    assert train(base, work, "train.py").stdout == f"v3 {folder}\n"


_VARIABLES = "import json, os\nprint(json.dumps(dict(os.environ)))"


def test_more_than_an_environment_holds_is_left_out(tmp_path):
    """A script starts with 100 hyperparameters of 2500 characters each; under the toolkit it does not."""
    base = write_job(
        tmp_path / "ml",
        resource_config({"homogeneousCluster": ["algo-1"]}, "algo-1"),
        channels={},
        hyperparameters={f"long{n}": "x" * 2500 for n in range(100)},
    )
    (base / "train.py").write_text(_VARIABLES)
    ended = train(base, base, "train.py")
    assert ended.returncode == 0, ended.stderr
    variables = json.loads(ended.stdout)
    assert len([name for name in variables if name.startswith("SM_HP_LONG")]) == 100
    assert not {"SM_HPS", "SM_TRAINING_ENV", "SM_USER_ARGS"} & set(variables)
    assert "not setting SM_HPS for the script" in ended.stderr


def test_variables_of_another_launcher_are_left_alone(tmp_path):
    """No ``SM_`` variable is added if SM_HOSTS is set without SageMaker's files: another launcher has set them all."""
    (tmp_path / "train.py").write_text(_VARIABLES)
    variables = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_HP_X": "1"}
    ended = train(tmp_path / "ml", tmp_path, "train.py", **variables)
    assert ended.returncode == 0, ended.stderr
    assert {name for name in json.loads(ended.stdout) if name.startswith("SM_")} == set(variables)


def test_nothing_else_is_loaded_to_start_a_script(base, work):
    """The launcher imports neither boto3, the toolkit nor pip if the code is not in S3."""
    (work / "train.py").write_text("")
    code = (
        "import sys\nfrom lightning_sm.__main__ import main\nassert main(['train', 'train.py']) == 0\n"
        "print({'boto3', 'sagemaker_training', 'pip'} & set(sys.modules))"
    )
    env = {**os.environ, "SAGEMAKER_BASE_DIR": str(base)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=work, env=env, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    assert ended.stdout == "set()\n"
