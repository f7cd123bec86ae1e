"""The ranks of a script: their variables, who starts them, and how they exit together."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.integration.hosts import Hosts
from tests.integration.launching import failure, started, train

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SHOW = (
    "import json, os, sys\n"
    f"seen = {{name: os.environ[name] for name in {_NAMES} if name in os.environ}}\n"
    "os.write(1, json.dumps(seen).encode() + b'\\n')\n"
)
# Write whole lines: an unbuffered print() writes the newline separately, so lines of two ranks could be joined.
_RANK = (
    "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    "def say(text):\n    os.write(1, f'{text}\\n'.encode())\n"
)
_MAIN = {"MASTER_ADDR": "algo-1", "MASTER_PORT": "29000"}
_PORT = {"LIGHTNING_SM_MAIN_PORT": "29000"}


def _seen(output: str) -> list[dict[str, str]]:
    return sorted((json.loads(line) for line in output.splitlines()), key=lambda seen: int(seen.get("RANK", 0)))


def test_a_script_finds_the_main_host_and_its_own_node_rank(base, work):
    """If the job sets no number of processes, RANK is not set, and Lightning can start the local ranks."""
    (work / "train.py").write_text(_SHOW)
    assert _seen(train(base, work, "train.py", **_PORT).stdout) == [{**_MAIN, "NODE_RANK": "1"}]


@pytest.mark.parametrize(
    ("hyperparameters", "variables"),
    [
        ({}, {"LIGHTNING_SM_DEVICES": "2"}),
        ({"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2"}, {}),
        ({"sagemaker_torch_distributed_enabled": "true"}, {"SM_NUM_GPUS": "2"}),
        ({"sagemaker_distributed_dataparallel_enabled": "true"}, {"SM_NUM_GPUS": "2"}),
    ],
)
def test_each_process_that_the_job_asks_for_is_a_rank(base, work, hyperparameters, variables):
    """LIGHTNING_SM_DEVICES or distribution={...} sets the number of ranks, and each rank has torchrun's variables."""
    write_job(base, hyperparameters=hyperparameters)
    code = base / "code"
    code.mkdir()
    (code / "train.py").write_text(_SHOW)
    (code / "subprocess.py").write_text("raise ImportError('only a module of the script has this name')")
    ended = train(base, work, "train.py", **_PORT, **variables)
    assert ended.returncode == 0, ended.stderr
    same = {**_MAIN, "NODE_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert _seen(ended.stdout) == [{**same, "RANK": "2", "LOCAL_RANK": "0"}, {**same, "RANK": "3", "LOCAL_RANK": "1"}]
    assert "num_nodes" not in ended.stderr


def test_one_process_per_host_is_a_rank_too(base, work):
    """With LIGHTNING_SM_DEVICES=1, the script is a rank and runs directly below the launcher."""
    (work / "train.py").write_text(_SHOW + "print(json.dumps({'parent': str(os.getppid())}))")
    with started(base, work, "train.py", **_PORT, LIGHTNING_SM_DEVICES="1") as running:
        assert running.exit_code() == 0, running.seen
    parent, seen = _seen("\n".join(line for line in running.seen if line.startswith("{")))
    assert seen == {
        **_MAIN,
        "NODE_RANK": "1",
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert parent == {"parent": str(running.process.pid)}


def test_a_data_host_has_no_rank(base, work):
    """A data host's script runs once, without a rank's variables."""
    groups = {"trainer": ["algo-1"], "data": ["algo-3"]}
    write_job(base, resource_config(groups, "algo-3", instance_types=dict.fromkeys(groups, "ml.m5.large")))
    (work / "train.py").write_text(_SHOW)
    assert _seen(train(base, work, "train.py", LIGHTNING_SM_DEVICES="2").stdout) == [{}]


def test_a_shell_script_starts_its_own_ranks(base, work):
    """A shell script runs once per host, even if the job asks for two processes, and the log explains why."""
    (work / "run.sh").write_text(f"{sys.executable} show.py")
    (work / "show.py").write_text(_SHOW)
    ended = train(base, work, "run.sh", **_PORT, LIGHTNING_SM_DEVICES="2")
    assert _seen(ended.stdout) == [{**_MAIN, "NODE_RANK": "1"}]
    assert "the job asks for 2 processes on each trainer host, but the script is not a Python file" in ended.stderr


def test_a_rank_that_fails_ends_the_others_of_its_host(base, work):
    """The host exits with the code of the first rank that failed, and the failure file names that rank."""
    (work / "train.py").write_text(_RANK + "os.kill(os.getpid(), 9) if rank == 3 else time.sleep(600)")
    ended = train(base, work, "train.py", LIGHTNING_SM_DEVICES="2")
    assert ended.returncode == 137
    how = "killed by SIGKILL (exit code 137)"
    assert failure(base).startswith(f"{how} on trainer host algo-2, rank 3")
    assert f"rank 3: {how}. Terminating the other ranks on this host." in ended.stderr


def test_a_rank_that_ignores_sigterm_is_killed(base, work):
    """A rank that ignores SIGTERM is killed; ``peers-gone`` exists before the rank gets SIGTERM."""
    os.mkfifo(work / "ready")
    (work / "train.py").write_text(
        _RANK
        + "if rank == 3:\n    open('ready').close()  # once rank 2 has opened it too\n    sys.exit(7)\n"
        + "def ignore(*_):\n    say(f\"gone {os.listdir(os.environ['LIGHTNING_SM_CONTROL_DIR'])}\")\n"
        + "signal.signal(signal.SIGTERM, ignore)\nopen('ready', 'w').close()\nwhile True:\n    time.sleep(600)\n"
    )
    ended = train(base, work, "train.py", LIGHTNING_SM_DEVICES="2")
    assert ended.returncode == 7
    assert failure(base).startswith("exit code 7 on trainer host algo-2, rank 3")
    assert "gone ['peers-gone']" in ended.stdout


def test_the_cause_is_named_though_its_consequence_exits_first(base, work):
    """The cause is named even if a rank that lost its connection exits before the failing rank prints its traceback."""
    os.mkfifo(work / "lives")
    (work / "train.py").write_text(
        _RANK
        + "if rank == 2:\n"
        + "    os.open('lives', os.O_WRONLY)  # until it exits\n"
        + "    raise RuntimeError('Connection closed by peer [127.0.0.3]:4711')\n"
        + "open('lives').read()\ntime.sleep(1)\nraise ValueError('bad sample')"
    )
    assert train(base, work, "train.py", LIGHTNING_SM_DEVICES="2").returncode == 1
    assert failure(base).startswith("ValueError: bad sample")


def test_ranks_may_need_different_times_to_stop(base, work):
    """A rank that has saved and exited with 143 does not interrupt a rank that is still saving."""
    os.mkfifo(work / "lives")
    (work / "train.py").write_text(
        _RANK
        + "def stop(*_):\n    say(f'told {rank}')\n"
        + "    if rank == 3:\n        lives.read()  # until the other one has exited\n        time.sleep(1)\n"
        + "    say(f'saved {rank}')\n    sys.exit(143)\n"
        + "lives = open('lives', 'w' if rank == 2 else 'r')\n"
        + "signal.signal(signal.SIGTERM, stop)\nsay(f'ready {rank}')\ntime.sleep(600)\n"
    )
    with started(base, work, "train.py", LIGHTNING_SM_DEVICES="2") as running:
        for _ in range(2):
            running.wait_for("ready")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 143, running.seen
    assert [line for line in running.seen if line.split()[0] in {"told", "saved"}].count("told 3") == 1
    assert {"saved 2", "saved 3"} <= set(running.seen)


_SEED = """
import argparse, json, os
import torch
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="gloo")
parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
parser.add_argument("--current-host", default=os.environ["SM_CURRENT_HOST"])
args = parser.parse_args()
dist.init_process_group(backend=args.backend, rank=args.hosts.index(args.current_host), world_size=len(args.hosts))
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"world {int(total)}\\n".encode())
dist.destroy_process_group()
"""
_LIGHTNING = """
import os, sys
import torch
from pytorch_lightning import LightningModule, Trainer
from lightning_sm import SageMakerCLI
from pytorch_lightning.demos.boring_classes import BoringModel

class Model(BoringModel):
    def on_fit_start(self):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        environment = self.trainer.strategy.cluster_environment
        text = f"{type(environment).__name__} rank {self.trainer.global_rank} world {int(total)}\\n"
        os.write(1, text.encode())  # in one piece, so that lines of several ranks do not mix

quiet = dict(accelerator="cpu", strategy="ddp", max_steps=1, limit_val_batches=0, logger=False)
quiet |= dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
"""
_PLAIN = _LIGHTNING + "Trainer(num_nodes=2, devices=2, **quiet).fit(Model())"
_CLI = _LIGHTNING + "SageMakerCLI(Model, trainer_defaults=quiet, save_config_callback=None)"


def _run(folder: Path, script: str, *args: str, **variables: str) -> str:
    """Run the script on two hosts, and return the output of both launchers."""
    hosts = Hosts(folder)
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "lightning_sm", "train", str(folder / "train.py"), *args]
    ended = hosts.run(dict.fromkeys(hosts.names, command), {"LIGHTNING_SM_REPORT_S": "0", **variables})
    output = "".join(end.output for end in ended.values())
    assert [end.code for end in ended.values()] == [0, 0], output
    assert "Ignoring MASTER" not in output
    return output


@pytest.mark.processes
def test_a_script_that_numbers_its_hosts_needs_the_main_address_only(tmp_path):
    """A script can take rank and world size from SM_HOSTS and SM_CURRENT_HOST, as it can in AWS's images."""
    output = _run(tmp_path, _SEED)
    assert output.count("world 2\n") == 2


@pytest.mark.processes
@pytest.mark.matrix(rows=["CLI-2"])
@pytest.mark.parametrize("devices", ["", "2"])
@pytest.mark.parametrize(
    ("script", "environment", "args"),
    [
        (_PLAIN, {"": "LightningEnvironment", "2": "TorchElasticEnvironment"}, ()),
        (_CLI, dict.fromkeys(("", "2"), "SageMakerEnvironment"), ("fit", "--trainer.devices=2")),
    ],
    ids=["Trainer", "SageMakerCLI"],
)
def test_a_script_of_lightning_has_the_same_ranks_whoever_starts_them(tmp_path, script, environment, args, devices):
    """The launcher starts the local ranks if the job sets their number, and Lightning does otherwise."""
    output = _run(tmp_path, script, *args, LIGHTNING_SM_DEVICES=devices)
    lines = sorted(line for line in output.splitlines() if "Environment rank" in line)
    assert lines == [f"{environment[devices]} rank {rank} world 4" for rank in range(4)], output
