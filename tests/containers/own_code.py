"""A user's code for the tests: a script with a module and a package beside it, and what its ranks saw."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.containers.engine import docker
from tests.containers.local_mode import LocalJob
from tests.fakes.wheel import write_wheel

ENTRY_POINT = "train.py"
_CODE = Path(__file__).parent / "scripts" / "own_code"
# Arguments of the model, with every type of value that a hyperparameter can have.
ARGUMENTS = {
    "flag": True,
    "off": False,
    "nothing": None,
    "numbers": [1, 2],
    "table": {"warm": 1.5, "cool": None},
    "phrase": "a b",
    "rate": 1e-05,
    "code": "007",
}
# The files that a training with SageMakerCLI saves in the model folder.
MODEL_FILES = {"model.ckpt", "state_dict.pt", "config.yaml"}
_IN_THE_MIDDLE = "is in the middle"
# Containers share the machine's cores, so more threads would wait for each other. A report adds seconds to the end of a
# job; test_image.py covers it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "LIGHTNING_SM_REPORT_S": "0"}


def source_dir(folder: Path, *, has_requirements: bool = False) -> str:
    """Return a copy of the code: local mode mounts it writable.

    Args:
        folder: Where to create it.
        has_requirements: Whether to add a requirements.txt, which every host installs.
    """
    copy = folder / "code"
    shutil.copytree(_CODE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if has_requirements:
        (copy / "requirements.txt").write_text(f"./{write_wheel(copy, 'wanted', '1.0')}\n")
    return str(copy)


def points(folder: Path) -> Path:
    """Create the data, and return its folder, for a channel.

    Args:
        folder: Where to create it.
    """
    data = folder / "points"
    data.mkdir(parents=True)
    (data / "points.txt").write_text("1 2 3 4 5 6 7 8")
    return data


def short(host: str) -> str:
    """Return a host's name without the random suffix of SDK v2: ``algo-1``.

    Args:
        host: The full name.
    """
    match = re.match(r"algo-\d+", host)
    assert match, f"{host!r} is no host of the SDK's"
    return match.group()


def seen(job: LocalJob) -> list[dict[str, Any]]:
    """Return what the ranks of a job saw, in rank order.

    Args:
        job: A job that ran this code.
    """
    facts = [json.loads(content) for name, content in job.artifacts.items() if re.search(r"/rank-\d+\.json$", name)]
    return sorted(({**one, "host": short(one["host"])} for one in facts), key=lambda one: one["rank"])


def places(job: LocalJob) -> list[tuple[int, str, int, int, int]]:
    """Return rank, host, node rank, local rank and world size of each rank, as Lightning saw them.

    Args:
        job: A job that ran this code.
    """
    names = ("rank", "host", "node_rank", "local_rank", "world_size")
    return [tuple(one[name] for name in names) for one in seen(job)]


def check_two_hosts(job: LocalJob, interface: str | None) -> None:
    """Assert that a job with one rank on each of two hosts succeeded, with ``ARGUMENTS`` and ``max_epochs=1``.

    Args:
        job: A job that ran this code.
        interface: The network interface that the ranks used; None: the script was given none.
    """
    assert job.has_succeeded, job
    assert set(job.model) == MODEL_FILES
    assert "failure" not in job.artifacts
    assert places(job) == [(0, "algo-1", 0, 0, 2), (1, "algo-2", 1, 0, 2)]
    for one in seen(job):
        assert one["met"] == [0, 1]
        assert one["arguments"] == ARGUMENTS
        assert (one["max_epochs"], one["interface"]) == (1, interface)


def stop_in_the_middle(label: str, num_hosts: int, running: Future[LocalJob]) -> None:
    """Stop all containers of a job, as the service does, once each has trained a step.

    Args:
        label: Label of the containers.
        num_hosts: Number of containers.
        running: The running job.
    """
    containers: list[str] = []
    while len(containers) < num_hosts:
        assert not running.done(), f"the job ended too early: {running.result()}"
        time.sleep(0.1)
        containers = docker("ps", "--quiet", "--filter", f"label={label}").stdout.split()
    for container in containers:
        lines = []
        with subprocess.Popen(["docker", "logs", "--follow", container], stdout=subprocess.PIPE, text=True) as log:
            assert log.stdout is not None
            for line in log.stdout:
                lines.append(line)
                if _IN_THE_MIDDLE in line:
                    break
            log.kill()
        assert _IN_THE_MIDDLE in "".join(lines[-1:]), f"container {container} never trained:\n{''.join(lines)}"
    docker("stop", "--time", "60", *containers)
