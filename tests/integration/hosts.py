"""Simulate the hosts of one job on this machine, and run commands on all of them, each with a separate disk."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lightning_sm.emulator import own_disk
from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.reserved_job import reserve_job
from tests.quick_processes import python_path

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Ended:
    """A finished command.

    Attributes:
        code: The exit code; None if it was killed because another command failed.
        output: Output to stdout and stderr.
        seconds: Run time.
    """

    code: int | None
    output: str
    seconds: float


class Hosts:
    """The hosts of one job.

    Args:
        folder: Folder in which the hosts' folders are created.
        groups: Hosts by instance group, in the order of SageMaker's resource configuration.
        interface: Name of the network interface in the resource configuration.
        instance_types: Instance type by group name, as in ``resource_config``.
        contents: Other files of the job, as in ``write_job``.

    Attributes:
        folder: Contains a folder for each host, with the host's name.
        names: Names of all hosts, sorted.
        job_name: Name of the job, which determines its ports; no other job on this machine has the same ports.
        main_port: Port of rank 0.
        spare_port: Port of the launchers, for tests that start no launcher.
    """

    def __init__(
        self,
        folder: Path,
        groups: Mapping[str, Sequence[str]] | None = None,
        *,
        interface: str = "lo",
        instance_types: Mapping[str, str] | None = None,
        **contents: Any,
    ) -> None:
        groups = groups or {"homogeneousCluster": ("algo-2", "algo-1")}
        self.folder = folder / "hosts"  # hidden from other hosts
        self.names = sorted(host for members in groups.values() for host in members)
        self.job_name, topology, ports = reserve_job(groups)
        weakref.finalize(self, ports.close)
        self.main_port, self.spare_port = topology.main_port, topology.peers_port
        for host in self.names:
            resources = resource_config(groups, host, instance_types=instance_types, interface=interface)
            write_job(self.folder / host, resources, **contents)
            for name in ("output", "model", "tmp"):
                (self.folder / host / name).mkdir()

    def address(self, host: str) -> str:
        """Return a host's loopback address, never 127.0.0.1, which would hide a wrong main address."""
        return f"127.0.0.{2 + self.names.index(host)}"

    def env(self, host: str) -> dict[str, str]:
        """Return the variables that SageMaker and the tests set on a host, without those of this shell's jobs."""
        return {
            "HOME": os.environ.get("HOME", "/"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": python_path(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            # Separate for each host: killed launchers leave folders there, and Open MPI's daemons must not share one.
            "TMPDIR": str(self.folder / host / "tmp"),
            "CUDA_VISIBLE_DEVICES": "",
            "SAGEMAKER_BASE_DIR": str(self.folder / host),
            "TRAINING_JOB_NAME": self.job_name,
            "LIGHTNING_SM_HOST_ADDRESSES": json.dumps({name: self.address(name) for name in self.names}),
        }

    def run(
        self, commands: Mapping[str, Sequence[str]], variables: Mapping[str, str] | None = None
    ) -> dict[str, Ended]:
        """Run one command on each host and wait for all. If one fails, kill the others, as SageMaker does.

        Every host sees only its own folder, at the same path on all hosts.

        Args:
            commands: Command by host.
            variables: Environment variables for all hosts, in addition to ``env``.
        """
        started = {}
        for host, command in commands.items():
            base = own_disk.base_dir(self.folder, self.folder / host)
            places = {"SAGEMAKER_BASE_DIR": str(base), "TMPDIR": str(base / "tmp")}
            env = {**self.env(host), **places, **(variables or {})}
            started[host] = own_disk.command(self.folder, self.folder / host, command), env
        return run_together(started)

    def seen(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Read what the ranks wrote, sorted by rank.

        Args:
            stage: If given, read only this stage.
        """
        found = [json.loads(path.read_text()) for path in self.folder.glob("*/output/seen-*.json")]
        return sorted((seen for seen in found if stage in (None, seen.get("stage"))), key=lambda seen: seen["rank"])


def check_rank_variables(seen: Iterable[Mapping[str, Any]], devices: int) -> None:
    """Check that every rank in the output of meet.py has torchrun's variables.

    Args:
        seen: Output of the ranks.
        devices: Ranks per host.
    """
    for rank in seen:
        place = {"RANK": rank["rank"], "WORLD_SIZE": rank["world_size"], "LOCAL_RANK": rank["local_rank"]}
        place |= {"LOCAL_WORLD_SIZE": devices, "GROUP_RANK": rank["node_rank"]}
        assert rank["variables"] == {name: str(number) for name, number in place.items()}


def run_together(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], timeout_s: float = TIMEOUT_S
) -> dict[str, Ended]:
    """Run commands in parallel, and kill all of them when one fails or the timeout expires.

    Args:
        commands: Command and environment by name.
        timeout_s: Timeout in seconds for all commands together.
    """
    started, processes, outputs = time.monotonic(), {}, {}
    ends: queue.Queue[tuple[str, int, float]] = queue.Queue()
    codes: dict[str, tuple[int, float]] = {}
    try:
        for name, (command, env) in commands.items():
            process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes[name] = process
            outputs[name] = bytearray()
            threading.Thread(target=_read, args=(process, name, outputs[name], ends), daemon=True).start()
        while len(codes) < len(commands) and not any(code for code, _ in codes.values()):
            name, code, ended = ends.get(timeout=max(0.0, started + timeout_s - time.monotonic()))
            codes[name] = code, ended - started
    except queue.Empty:
        raise AssertionError(f"not within {timeout_s} s: {sorted(set(commands) - set(codes))}") from None
    finally:
        _end(processes.values())
        # pytest shows the output if the test fails.
        sys.stdout.writelines(
            f"--- {name}\n{bytes(output).decode(errors='replace')}\n" for name, output in outputs.items()
        )
    seconds = time.monotonic() - started
    return {
        name: Ended(
            codes[name][0] if name in codes else None,
            bytes(outputs[name]).decode(errors="replace"),
            codes[name][1] if name in codes else seconds,
        )
        for name in commands
    }


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Stop each process group, first with SIGTERM, so that multiprocessing unlinks its named semaphores."""
    with_children = [(process, _family(process.pid)) for process in processes]
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process, family in with_children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            psutil.wait_procs(family, timeout=3)
            process.poll()


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def script(name: str, *arguments: str | Mapping[str, Any]) -> list[str]:
    """Build the command of a script in ``scripts``.

    Args:
        name: Name of the script.
        arguments: Arguments of the script; mappings are passed as JSON.
    """
    texts = [argument if isinstance(argument, str) else json.dumps(argument) for argument in arguments]
    return [sys.executable, str(SCRIPTS / name), *texts]


def _read(
    process: subprocess.Popen[bytes], name: str, output: bytearray, ends: queue.Queue[tuple[str, int, float]]
) -> None:
    assert process.stdout is not None
    with process.stdout:
        while chunk := process.stdout.read1(65536):
            output += chunk
    ends.put((name, process.wait(), time.monotonic()))
