"""``lightning-sm local``: an emulated cluster of real processes, with scripts that need no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from lightning_sm.errors import PortInUseError, TopologyError
from lightning_sm.instance_groups import GroupSpec
from lightning_sm.job import SageMakerJob
from lightning_sm.local.cluster import ClusterSpec, LocalCluster
from lightning_sm.topology import Role, Topology
from tests.integration.emulators import processes_of, until

_TIMEOUT_S = 30
_PAUSE = threading.Event()
_HOST = "import os\nbase = os.environ['SAGEMAKER_BASE_DIR']\nhost = os.path.basename(base)\n"
# Says on the disk that it runs, and waits for a signal without ever ending by itself in a passing test.
_WAIT = f"{_HOST}open(base + '/ready', 'w').close()\nimport threading\nthreading.Event().wait({2 * _TIMEOUT_S})\n"
_STUBBORN = "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + _WAIT


@pytest.fixture
def work(tmp_path):
    """The user's working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def jobs(tmp_path):
    """The folder for ``--base-dir``; it must not exist before."""
    return tmp_path / "jobs"


def _command(jobs, args):
    return [sys.executable, "-m", "lightning_sm", "local", "--base-dir", str(jobs), *args]


def _local(jobs, work, *args, **variables):
    return subprocess.run(
        _command(jobs, args),
        cwd=work,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=_TIMEOUT_S,
    )


@contextmanager
def _started(jobs, work, *args, num_hosts):
    """An emulator in the background whose scripts all run."""
    process = subprocess.Popen(
        _command(jobs, args), cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until(lambda: len(list(jobs.glob("*/*/ready"))) == num_hosts, "all scripts run", _TIMEOUT_S)
        yield process
    finally:
        process.kill()
        for left in processes_of(jobs):
            left.kill()
        process.communicate(timeout=_TIMEOUT_S)


def _job_dir(jobs):
    (found,) = jobs.iterdir()
    return found


def test_every_host_runs_the_script_and_lines_carry_its_name(jobs, work):
    """All hosts of all groups run the same script with the same arguments, each line shows which host wrote it."""
    (work / "train.py").write_text(_HOST + "import sys\nprint('argv', sys.argv[1:])")
    ended = _local(jobs, work, "--group", "trainer=2", "--group", "data=1", "--", "train.py", "fit", "--x=1")
    assert ended.returncode == 0
    for host in ("algo-1", "algo-2", "algo-3"):
        assert f"{host} | argv ['fit', '--x=1']" in ended.stdout.splitlines()
    assert "\x1b" not in ended.stdout


def test_dashes_before_the_script_are_optional(jobs, work):
    """The script may follow the options directly; dashes among its own arguments stay."""
    (work / "train.py").write_text("import sys\nprint('argv', sys.argv[1:])")
    assert "algo-1 | argv ['--a', '--', 'b']" in _local(jobs, work, "--seed", "1", "train.py", "--a", "--", "b").stdout


def test_summary_shows_group_role_and_exit_code(jobs, work):
    """The table at the end has one line for each host."""
    (work / "train.py").write_text("")
    ended = _local(jobs, work, "--group", "trainer=1", "--group", "data=1", "--seed", "1", "--", "train.py")
    table = ended.stdout[ended.stdout.index("host ") :]
    assert re.search(r"^algo-\d +trainer +trainer +0 +\d+\.\d$", table, re.MULTILINE)
    assert re.search(r"^algo-\d +data +data +0 +\d+\.\d$", table, re.MULTILINE)


def test_folders_are_removed_after_success(jobs, work):
    """A job that succeeded leaves nothing, not even the folder that was made for it."""
    (work / "train.py").write_text(_HOST + "open(base + '/model/m.bin', 'w').close()")
    assert _local(jobs, work, "--", "train.py").returncode == 0
    assert not jobs.exists()


def test_keep_shows_where_the_model_lies(jobs, work):
    """With --keep the folders stay, and the first path shown is that of the model."""
    (work / "train.py").write_text(_HOST + "if host == 'algo-2': open(base + '/model/m.bin', 'w').write('x')")
    ended = _local(jobs, work, "--group", "trainer=2", "--keep", "--", "train.py")
    model = _job_dir(jobs) / "algo-2" / "model"
    lines = ended.stdout.splitlines()
    at = lines.index(f"model of algo-2: {model}")
    assert lines[at + 1] == "  m.bin"
    assert not any(str(jobs) in line for line in lines[:at] if " | " not in line)
    assert "model of algo-1" not in ended.stdout
    assert (model / "m.bin").read_text() == "x"
    assert (_job_dir(jobs) / "algo-1" / "output" / "log.txt").read_text().startswith("lightning-sm ")


def test_failing_host_ends_the_others(jobs, work):
    """When one host fails, the others are stopped at once, and its exit code and reason are those of the job."""
    (work / "train.py").write_text(
        "import os, sys, threading, time\nfrom pathlib import Path\n"
        "base = Path(os.environ['SAGEMAKER_BASE_DIR'])\n(base / 'ready').touch()\n"
        f"deadline = time.monotonic() + {_TIMEOUT_S}\n"
        "while len(list(base.parent.glob('*/ready'))) < 3 and time.monotonic() < deadline:\n"
        "    threading.Event().wait(0.01)\n"
        "if base.name == 'algo-2':\n    print('no more data', file=sys.stderr)\n    sys.exit(9)\n"
        f"threading.Event().wait({2 * _TIMEOUT_S})\n"
    )
    ended = _local(jobs, work, "--group", "trainer=3", "--", "train.py")
    assert ended.returncode == 9
    assert "Host algo-2 (group trainer) failed with exit code 9." in ended.stdout
    assert "  no more data" in ended.stdout
    assert re.search(r"^algo-1 +trainer +trainer +143 ", ended.stdout, re.MULTILINE)
    assert f"kept in {_job_dir(jobs)}" in ended.stdout
    assert not processes_of(jobs)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stopping_the_emulator_stops_all_hosts(jobs, work, signum, code):
    """Ctrl-C and its kin end every process within seconds."""
    (work / "train.py").write_text(_WAIT)
    with _started(jobs, work, "--group", "trainer=2", "--", "train.py", num_hosts=2) as emulator:
        asked = time.monotonic()
        emulator.send_signal(signum)
        assert emulator.wait(_TIMEOUT_S) == code
        assert time.monotonic() - asked < 5
        assert not processes_of(jobs)
        assert re.search(r"^algo-1 +trainer +trainer +143 ", emulator.stdout.read(), re.MULTILINE)


def test_hosts_that_ignore_sigterm_are_killed(jobs, work):
    """Scripts that do not react to SIGTERM are killed after 5 s."""
    (work / "train.py").write_text(_STUBBORN)
    with _started(jobs, work, "--group", "trainer=2", "--", "train.py", num_hosts=2) as emulator:
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(_TIMEOUT_S) == 130
        assert not processes_of(jobs)


def test_second_signal_kills_at_once(jobs, work):
    """Who presses Ctrl-C twice does not wait for the grace period."""
    (work / "train.py").write_text(_STUBBORN)
    with _started(jobs, work, "--", "train.py", num_hosts=1) as emulator:
        emulator.send_signal(signal.SIGINT)
        while not (line := emulator.stdout.readline()).startswith("Stopping all hosts"):
            assert line
        asked = time.monotonic()
        _PAUSE.wait(0.7)  # signals that come at nearly the same time count as one
        emulator.send_signal(signal.SIGINT)
        assert emulator.wait(_TIMEOUT_S) == 130
        assert time.monotonic() - asked < 4
        assert not processes_of(jobs)


@pytest.mark.parametrize("script", [_WAIT, _STUBBORN])
def test_killing_the_emulator_leaves_no_process(jobs, work, script):
    """Even after SIGKILL of the emulator every host ends, also one that ignores SIGTERM."""
    (work / "train.py").write_text(script)
    with _started(jobs, work, "--group", "trainer=2", "--", "train.py", num_hosts=2) as emulator:
        assert processes_of(jobs)
        emulator.kill()
        until(lambda: not processes_of(jobs), "no process is left", _TIMEOUT_S)


def test_processes_that_left_their_group_are_found(jobs, work):
    """A daemon that a script started in a session of its own does not outlive the job."""
    (work / "train.py").write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {_WAIT!r}], start_new_session=True)\nprint(child.pid)"
    )
    ended = _local(jobs, work, "--", "train.py")
    assert ended.returncode == 0
    assert not processes_of(jobs)


def test_output_that_is_not_text_passes(jobs, work):
    """Bytes that are no UTF-8, progress bars and lines without an end do not stop the emulator."""
    (work / "train.py").write_text(
        "import os\nos.write(1, b'\\xff\\xfe\\n50%\\r100%\\r\\n')\nos.write(2, b'no newline')"
    )
    ended = _local(jobs, work, "--", "train.py")
    assert ended.returncode == 0
    for line in ("algo-1 | \ufffd\ufffd", "algo-1 | 100%", "algo-1 | no newline"):
        assert line in ended.stdout.splitlines()


def test_reader_that_goes_away_ends_the_job(jobs, work):
    """As with other commands, ``| head`` ends the emulator instead of leaving it to run unseen."""
    (work / "train.py").write_text("while True: print('line')")
    with subprocess.Popen(_command(jobs, ["--", "train.py"]), cwd=work, stdout=subprocess.PIPE) as emulator:
        emulator.stdout.readline()
        emulator.stdout.close()
        assert emulator.wait(_TIMEOUT_S) == 141
    assert not processes_of(jobs)


def test_stray_variables_do_not_reach_the_hosts(jobs, work):
    """What other launchers and jobs left in the shell is gone; the user's own variables and --env are there."""
    (work / "train.py").write_text("import json, os\nprint('env', json.dumps(dict(os.environ)))")
    stray = {
        "SM_MASTER_ADDR": "x",
        "NODE_RANK": "3",
        "MASTER_ADDR": "x",
        "OMPI_COMM_WORLD_RANK": "1",
        "PL_GLOBAL_SEED": "7",
    }
    others = {"LIGHTNING_SM_MAIN_PORT": "1", "WORLD_SIZE": "9", "TRAINING_JOB_ARN": "arn", "SLURM_NTASKS": "2"}
    ended = _local(
        jobs,
        work,
        "--devices",
        "2",
        "--env",
        "MODE=fast",
        "--",
        "train.py",
        **stray,
        **others,
        SM_HOSTS="[]",
        MINE="1",
        OMP_NUM_THREADS="5",
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("algo-1 | env ")]
    env = json.loads(line.removeprefix("algo-1 | env "))
    assert not env.keys() & (stray.keys() | others.keys())
    assert (env["MINE"], env["MODE"], env["LIGHTNING_SM_DEVICES"], env["OMP_NUM_THREADS"]) == ("1", "fast", "2", "5")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["SM_HOSTS"] == '["algo-1"]'
    assert env["TRAINING_JOB_NAME"].startswith("local-")
    assert env["AWS_REGION"]


@pytest.mark.parametrize(
    ("name", "text"), [("h.json", '{"a": {"b": 1}, "c": "x y"}'), ("h.yaml", "a: {b: 1}\nc: x y\n")]
)
def test_hyperparameters_channels_and_checkpoints(jobs, work, tmp_path, name, text):
    """Hosts find hyperparameters, channels and the shared checkpoint folder where the service puts them."""
    (work / name).write_text(text)
    (work / "train.py").write_text(
        _HOST + "import json, sys\nopen('checkpoints/' + host, 'w').close()\n"
        "print('argv', sys.argv[1:])\nprint('data', open(base + '/input/data/training/f.txt').read())\n"
        "print('checkpoints', json.load(open(base + '/input/config/checkpointconfig.json')))\n"
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f.txt").write_text("found")
    options = ["--hyperparameters", name, "--channel", f"training={tmp_path / 'd'}", "--checkpoints", "checkpoints"]
    ended = _local(jobs, work, "--group", "trainer=2", *options, "--", "train.py", "fit")
    folder = work / "checkpoints"
    assert ended.returncode == 0
    assert """algo-1 | argv ['fit', '--a={"b": 1}', '--c=x y']""" in ended.stdout
    assert "algo-2 | data found" in ended.stdout
    assert f"algo-1 | checkpoints {{'LocalPath': '{folder}', 'S3Uri': 'file://{folder}'}}" in ended.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["algo-1", "algo-2"]
    assert (tmp_path / "d" / "f.txt").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--group", "trainer"], "--group 'trainer': expected NAME=COUNT"),
        (["--group", "trainer=x"], "--group 'trainer=x'"),
        (["--group", "trainer=1:t2"], "--group 'trainer=1:t2'"),
        (["--group", "trainer=0"], "Group 'trainer' has 0 hosts"),
        (["--group", "trainer=300"], "300 hosts"),
        (["--group", "a=1", "--group", "a=2"], "Group 'a' is named twice"),
        (["--group", "data=1", "--group", "data2=1"], "No group trains"),
        (["--group", "a=1:ml.g5.xlarge", "--group", "b=1:ml.g5.12xlarge"], "different numbers of GPUs"),
        (["--devices", "0"], "0 devices"),
        (["--channel", "x"], "--channel 'x': expected NAME=DIR"),
        (["--channel", "x=nix"], "Channel 'x': the folder 'nix' does not exist"),
        (["--channel", "x=.", "--channel", "x=."], "'x' is named twice"),
        (["--channel", "a/b=."], "Channel 'a/b'"),
        (["--channel", "..=."], "Channel '..'"),
        (["--env", "X"], "--env 'X': expected NAME=VALUE"),
        (["--hyperparameters", "nix.json"], "nix.json"),
        (["--hyperparameters", "broken.json"], "broken.json"),
        (["--hyperparameters", "broken.yaml"], "broken.yaml"),
        (["--hyperparameters", "list.yaml"], "expected names and values, got list"),
        (["--base-dir", "broken.yaml"], "broken.yaml"),
        (["--checkpoints", "broken.yaml"], "broken.yaml"),
    ],
)
def test_bad_options_start_nothing(jobs, work, args, message):
    """A wrong option ends the command with exit code 2 and one message that names it, before anything exists."""
    (work / "train.py").write_text("print('started')")
    (work / "broken.json").write_text("{'a': 1}")
    (work / "broken.yaml").write_text("a: [1\nb: 2")
    (work / "list.yaml").write_text("- 1")
    ended = _local(jobs, work, *args, "--", "train.py")
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stderr.startswith("lightning-sm: error: ")
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not jobs.exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([], "No training script is named"),
        (["nix.py"], "'nix.py' cannot be read"),
        (["notes.txt"], "neither a Python file"),
        (["broken.py"], "broken.py:2: "),
        (["null.py"], "null.py"),
    ],
)
def test_bad_scripts_start_nothing(jobs, work, script, message):
    """A script that is missing or does not compile is reported once, not by every host."""
    (work / "broken.py").write_text("x = 1\ndef f(:\n")
    (work / "null.py").write_bytes(b"x = '\0'\n")
    ended = _local(jobs, work, "--group", "trainer=3", "--", *script)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stdout == ""
    assert not jobs.exists()


def _groups(cluster):
    job = SageMakerJob.from_environment(cluster.hosts[0].env)
    return [(group.name, group.hosts) for group in job.groups]


def test_groups_are_dealt_at_random_and_repeat_with_a_seed(tmp_path):
    """The same seed gives the same groups, other seeds give others, with hosts in any order."""
    groups = [GroupSpec("trainer", 4), GroupSpec("data", 8)]
    drawn = []
    for seed in (1, 1, 2, 3):
        with LocalCluster(ClusterSpec(groups, seed=seed), tmp_path) as cluster:
            drawn.append(_groups(cluster))
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] != drawn[3]
    assert any(hosts != tuple(sorted(hosts)) for _, hosts in drawn[0])


def test_resource_config_is_the_services(tmp_path):
    """resourceconfig.json has exactly the service's keys, and hosts sorted as text."""
    with LocalCluster(ClusterSpec([GroupSpec("gpu", 10, "ml.g5.xlarge"), GroupSpec("data", 1)]), tmp_path) as cluster:
        for host in cluster.hosts:
            config = json.loads((host.base_dir / "input" / "config" / "resourceconfig.json").read_text())
            assert sorted(config) == [
                "current_group_name",
                "current_host",
                "current_instance_type",
                "hosts",
                "instance_groups",
                "network_interface_name",
            ]
            assert config["hosts"][:3] == ["algo-1", "algo-10", "algo-11"]
            assert (config["current_host"], config["current_group_name"]) == (host.name, host.group)
            assert sorted(config["instance_groups"][0]) == ["hosts", "instance_group_name", "instance_type"]
            assert host.role is (Role.DATA if host.group == "data" else Role.TRAINER)


def test_all_hosts_agree_on_a_free_port_and_have_addresses(tmp_path):
    """Every host derives the same topology; its port is free, and each host has an address of its own."""
    with LocalCluster(ClusterSpec([GroupSpec("trainer", 3)], devices=2), tmp_path) as cluster:
        jobs = [SageMakerJob.from_environment(host.env) for host in cluster.hosts]
        (port,) = {Topology.from_job(job).main_port for job in jobs}
        assert len(set(jobs[0].addresses.values())) == 3
        assert jobs[0].devices == 2
        with socket.create_server((jobs[0].addresses[Topology.from_job(jobs[0]).main_host], port)):
            pass


def test_stated_port_that_is_taken_is_refused(tmp_path):
    """A main port that the user chose and that is taken is an error that names it."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        with pytest.raises(PortInUseError, match=port):
            LocalCluster(ClusterSpec(environment={"LIGHTNING_SM_MAIN_PORT": port}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_data_groups_can_be_named(tmp_path):
    """LIGHTNING_SM_DATA_GROUPS, given as the job's environment, decides the roles; an unknown group is refused."""
    groups = [GroupSpec("a", 1), GroupSpec("b", 1)]
    with LocalCluster(ClusterSpec(groups, environment={"LIGHTNING_SM_DATA_GROUPS": "b"}), tmp_path) as cluster:
        assert {host.group: host.role for host in cluster.hosts} == {"a": Role.TRAINER, "b": Role.DATA}
    with pytest.raises(TopologyError, match="no such group"):
        LocalCluster(ClusterSpec(groups, environment={"LIGHTNING_SM_DATA_GROUPS": "c"}), tmp_path)


def test_cluster_removes_its_folders_even_after_an_error(tmp_path):
    """Leaving the context removes the folders, unless they are to be kept."""
    with pytest.raises(ZeroDivisionError), LocalCluster(ClusterSpec(), tmp_path / "jobs"):
        _ = 1 / 0
    assert not (tmp_path / "jobs").exists()
    with LocalCluster(ClusterSpec(), tmp_path / "jobs") as cluster:
        cluster.keep = True
    assert cluster.job_dir.is_dir()


def test_help_has_examples():
    """--help of both commands shows how they are used."""
    for command, example in (("train", "SAGEMAKER_PROGRAM"), ("local", "--group trainer=2 --group data=1")):
        arguments = [sys.executable, "-m", "lightning_sm", command, "--help"]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
        assert example in ended.stdout
