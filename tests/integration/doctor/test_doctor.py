"""``lightning-sm doctor`` as a command, on hosts that are well and on hosts that are not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from lightning_sm.emulator import own_disk
from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.job.emulated_service import GroupSpec
from tests.fakes.job_folder import resource_config, write_job
from tests.integration.launching import failure, train

_COMMAND = (sys.executable, "-m", "lightning_sm", "doctor")
_TIMEOUT_S = 60
_FOREIGN = ("SM_", "SAGEMAKER_", "LIGHTNING_SM_", "TRAINING_JOB_", "NCCL_", "GLOO_")


def _doctor(*args, env=None, command=_COMMAND, **variables):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return subprocess.run(
        [*command, *args],
        env={**(inherited if env is None else env), "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def _results(ended):
    return json.loads(ended.stdout)["results"]


@pytest.fixture
def base(tmp_path):
    """A host of a job with two trainer hosts, whose names no resolver knows."""
    groups = {"trainer": ["algo-2", "algo-1"]}
    base = write_job(
        tmp_path / "ml",
        resource_config(groups, "algo-1", instance_types={"trainer": "ml.m5.large"}, interface="lo"),
    )
    for name in ("model", "output"):
        (base / name).mkdir()
    return base


def test_off_sagemaker_nothing_is_wrong(tmp_path):
    """On a machine without a job the table ends with a summary and the exit code is 0."""
    ended = _doctor(SAGEMAKER_BASE_DIR=str(tmp_path / "none"))
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout
    assert lines[0].split() == ["check", "status", "found", "what", "to", "do"]
    assert lines[2].split()[:2] == ["job", "ok"]
    assert "Not a SageMaker host" in lines[2]
    assert lines[-1].startswith("0 problems")
    assert ended.stderr == ""


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("number", [0, 2])
def test_hosts_of_the_emulator_are_well(tmp_path, number):
    """On each host of an emulated cluster the facts of the job are shown, and no check of it finds a problem."""
    spec = ClusterSpec(groups=[GroupSpec("trainer", 2), GroupSpec("data", 1)], bucket=tmp_path / "checkpoints")
    with LocalCluster(spec, tmp_path / "jobs") as cluster:
        host = cluster.hosts[number]
        command = own_disk.command(cluster.job_dir, host.folder, _COMMAND)
        ended = _doctor("--json", env=host.env, command=command)
    found = {}
    for result in _results(ended):
        found.setdefault(result["name"], []).append(result["found"])
    assert ended.returncode == 0, ended.stdout
    assert cluster.name in found["job"][0]
    assert found["this host"][0].startswith(f"{host.name}, group {host.group} ")
    assert "algo-3 127.0.0.4" in found["names"][0]
    assert "(nothing listens yet)" in found["other hosts"][0]
    assert str(tmp_path / "checkpoints") in found["checkpoints"][0]


def test_broken_file_of_the_service_is_a_problem(base):
    """A malformed resourceconfig.json gives exit code 1 and its text; the other checks still run."""
    write_job(base, resources="{not json")
    ended = _doctor("--json", SAGEMAKER_BASE_DIR=str(base))
    problems = [result for result in _results(ended) if result["status"] == "problem"]
    assert ended.returncode == 1
    assert [result["name"] for result in problems] == ["job"]
    assert "{not json" in problems[0]["found"]
    assert "versions" in {result["name"] for result in _results(ended)}


@pytest.mark.parametrize(
    ("hyperparameters", "variables"),
    [
        ({}, {"LIGHTNING_SM_STOP_SCHEDULE": "abc"}),
        ({}, {"LIGHTNING_SM_PEERS_TIMEOUT_S": "10s"}),
        ({}, {"LIGHTNING_SM_PREPARE_S": "x"}),
        ({}, {"LIGHTNING_SM_INSTALL_REQUIREMENTS": "maybe"}),
        ({}, {"SAGEMAKER_PROGRAM": "app/trian.py"}),
        ({}, {"SAGEMAKER_PROGRAM": ""}),
        ({"mp_parameters": '{"partitions": 2}'}, {}),
        ({"mp_parameters": '{"partitions": 1, "horovod": true}'}, {}),
        ({"x__0": "a", "x__2": "c"}, {}),
    ],
)
def test_doctor_says_what_the_launcher_would(tmp_path, hyperparameters, variables):
    """Where the launcher ends before the script starts, the doctor has a problem with the launcher's words."""
    resources = resource_config({"trainer": ["localhost"]}, "localhost", interface="lo")
    base = write_job(tmp_path / "ml", resources, hyperparameters=hyperparameters)
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text("print('started')")
    variables = {"SAGEMAKER_PROGRAM": "train.py", **variables}
    started = train(base, base / "code", **variables)
    assert (started.returncode, started.stdout) == (2, "")
    ended = _doctor("--json", SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_SUBMIT_DIRECTORY=str(base / "code"), **variables)
    said = failure(base).partition(": ")[2].partition(" Tried: ")[0].partition("\non trainer host ")[0]
    assert ended.returncode == 1
    assert [row["name"] for row in _results(ended) if row["status"] == "problem" and row["found"].startswith(said)]


def test_sound_job_starts_without_a_problem(tmp_path):
    """The doctor has no problem with a job that the launcher would start."""
    resources = resource_config({"trainer": ["localhost"]}, "localhost", interface="lo")
    base = write_job(tmp_path / "ml", resources, hyperparameters={"subcommand": "fit"})
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text("")
    ended = _doctor("--json", SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_PROGRAM="train.py")
    rows = {row["name"]: row for row in _results(ended)}
    assert [rows[name]["status"] for name in ("variables", "script", "hyperparameters")] == ["ok", "ok", "ok"]


def test_file_system_that_hangs_does_not_hang_the_doctor(base):
    """Where a file of the service cannot be read to its end, the checks that need it say so, and the others run."""
    (base / "input" / "config" / "resourceconfig.json").unlink()
    os.mkfifo(base / "input" / "config" / "resourceconfig.json")
    ended = _doctor("--json", "--timeout", "5", SAGEMAKER_BASE_DIR=str(base))
    rows = {result["name"]: result for result in _results(ended)}
    assert ended.returncode == 1
    assert "did not finish within 5 s" in rows["facts"]["found"]
    assert rows["versions"]["status"] == "ok"


def test_names_that_do_not_resolve_are_found_by_the_deadline(base):
    """Unknown hosts give exit code 1 and their names, in the time that was given."""
    started = time.monotonic()
    ended = _doctor("--timeout", "5", SAGEMAKER_BASE_DIR=str(base))
    assert time.monotonic() - started < 60
    assert ended.returncode == 1
    assert "2 of 2 host names did not resolve: algo-1 (" in ended.stdout


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("address", ["192.0.2.1", "203.0.113.1"])
def test_addresses_that_nobody_has_are_out_of_reach(base, address):
    """Addresses that are reserved for documentation do not hold the run up, whatever the network makes of them."""
    addresses = json.dumps({"algo-1": "127.0.0.2", "algo-2": address})
    started = time.monotonic()
    ended = _doctor("--json", "--timeout", "4", SAGEMAKER_BASE_DIR=str(base), LIGHTNING_SM_HOST_ADDRESSES=addresses)
    assert time.monotonic() - started < 60
    assert json.loads(ended.stdout)["seconds"] < 30
    rows = [result for result in _results(ended) if result["name"] == "other hosts"]
    assert len(rows) == 1


def test_host_behind_a_firewall_is_a_problem(base):
    """A host from which nothing comes back is a problem that names the security group."""
    with ExitStack() as sockets:
        server = sockets.enter_context(socket.socket())
        server.bind(("127.0.0.3", 0))
        port = server.getsockname()[1]
        server.listen(0)
        for _ in range(4):  # Linux drops packets where the queue of a listener is full
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.3", port))
        ended = _doctor(
            "--timeout",
            "3",
            SAGEMAKER_BASE_DIR=str(base),
            LIGHTNING_SM_MAIN_PORT=str(port),
            LIGHTNING_SM_HOST_ADDRESSES=json.dumps({"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"}),
        )
    assert ended.returncode == 1
    assert "No answer within" in ended.stdout
    assert "security group" in ended.stdout


def test_port_of_a_running_training_is_no_problem(base):
    """In a shell on a host that trains, the port of rank 0 is taken by the training, and that is said."""
    script = base.parent / "train.py"
    script.write_text(
        "import signal, socket\nserver = socket.create_server(('', 0))\n"
        f"print(server.getsockname()[1], flush=True)\nsignal.alarm({_TIMEOUT_S})\nsignal.pause()"
    )
    variables = {"SAGEMAKER_BASE_DIR": str(base), "LIGHTNING_SM_HOST_ADDRESSES": '{"algo-2": "127.0.0.3"}'}
    command = [sys.executable, "-m", "lightning_sm", "train", str(script)]
    with subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True) as training:
        port = training.stdout.readline().strip()
        try:
            ended = _doctor("--json", "--timeout", "10", LIGHTNING_SM_MAIN_PORT=port, **variables)
        finally:
            training.terminate()
    # Others may be warnings: the system gave the script one of its ephemeral ports.
    rows = [result["found"] for result in _results(ended) if (result["name"], result["status"]) == ("own port", "ok")]
    assert rows[0].startswith(f"{port}: the training listens (process ")


def test_strict_makes_warnings_count(tmp_path):
    """A warning leaves the exit code at 0, unless --strict is given."""
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "LIGHTNING_SM_PORT": "1"}
    assert _doctor(**variables).returncode == 0
    ended = _doctor("--strict", "--json", **variables)
    assert (ended.returncode, json.loads(ended.stdout)["exit_code"]) == (1, 1)


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_timeout_that_is_none_is_refused(seconds):
    """A timeout must be a positive number."""
    ended = _doctor(f"--timeout={seconds}")
    assert ended.returncode == 2
    assert "expected a positive number" in ended.stderr


def test_closed_pipe_is_no_error(tmp_path):
    """A reader that has seen enough gets no traceback: lightning-sm doctor | head."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_sm", "doctor"],
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(_TIMEOUT_S) in (0, 1)


def test_report_that_cannot_be_written_is_said(tmp_path):
    """On a full disk the exit code is 1 and stderr says why, without a traceback."""
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "lightning_sm", "doctor"],
            env={**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    assert ended.returncode == 1
    assert ended.stderr == "lightning-sm doctor: the report cannot be written: No space left on device.\n"


def test_doctor_starts_without_torch_and_lightning():
    """Torch and Lightning may be broken, and take seconds to import."""
    code = (
        "import sys\nfrom lightning_sm.doctor.context import Context\n"
        "from lightning_sm.doctor.run import examine\nexamine(Context.of({}, 20))\n"
        "print({'torch', 'pytorch_lightning', 'lightning', 'grpc'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    assert ended.stdout == "set()\n"
