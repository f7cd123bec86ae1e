"""A Docker engine for the tests: the running one, or a temporary one that is removed completely."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# Folder in which several test runs share one engine's images, because building them takes minutes.
FOLDER_VARIABLE = "LIGHTNING_SM_TEST_ENGINE"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.1
_FREE_GB = 20
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_NETWORK_RULES = ("iptables-save", "iptables-restore")


def docker(*arguments: str, timeout_s: float = 120.0, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of the Docker client and return its output, stderr merged into stdout.

    Raises:
        AssertionError: The command failed; the message has its output.
    """
    ended = subprocess.run(
        ["docker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check:
        assert ended.returncode == 0, f"docker {' '.join(arguments)} failed:\n{ended.stdout}"
    return ended


def is_running() -> bool:
    """Whether an engine answers."""
    return shutil.which("docker") is not None and docker("info", check=False).returncode == 0


def what_is_missing() -> list[str]:
    """Return what this machine lacks for a temporary engine."""
    commands = ("docker", "dockerd", *_NETWORK_RULES)
    missing = [f"{command} (Debian: docker.io, iptables)" for command in commands if shutil.which(command) is None]
    return missing if os.geteuid() == 0 else ["root", *missing]


@contextmanager
def own_engine(folder: Path) -> Iterator[None]:
    """Run an engine that keeps everything in a folder, and restore the machine's network afterwards.

    Args:
        folder: A folder for the engine alone. It grows to 14 GB; the caller removes it.

    Raises:
        AssertionError: The disk has too little space, which would fail all later tests, or the engine did not
            start or stop; the message has its log.
    """
    free_gb = shutil.disk_usage(folder).free / 1e9
    assert free_gb >= _FREE_GB or (folder / "data").exists(), (
        f"the disk of {folder} has {free_gb:.0f} GB free, and images of the tests need {_FREE_GB}: "
        f"make room, or set TMPDIR to a folder on another disk"
    )
    was_forwarding = _FORWARDING.read_text(encoding="ascii")
    rules = subprocess.run([_NETWORK_RULES[0]], capture_output=True, text=True, check=True).stdout
    links = set(psutil.net_if_stats())
    # If the engine enabled forwarding itself, it would also make the machine drop packets of other bridges.
    _FORWARDING.write_text("1", encoding="ascii")
    log = folder / "dockerd.log"
    options = ["--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid"]
    with log.open("w") as output:
        engine = subprocess.Popen(["dockerd", *options], stdout=output, stderr=output, start_new_session=True)
    try:
        _await_start(engine, log)
        yield
    finally:
        engine.terminate()
        try:
            engine.wait(_STOP_TIMEOUT_S)
        finally:
            engine.kill()
            for link in set(psutil.net_if_stats()) - links:
                subprocess.run(["ip", "link", "delete", link], check=True)
            subprocess.run([_NETWORK_RULES[1]], input=rules, text=True, check=True)
            _FORWARDING.write_text(was_forwarding, encoding="ascii")


def _await_start(engine: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(int(_START_TIMEOUT_S / _POLL_S)):
        if is_running():
            return
        if engine.poll() is not None:
            break
        time.sleep(_POLL_S)
    raise AssertionError(f"dockerd does not answer within {_START_TIMEOUT_S:.0f} s:\n{log.read_text()}")
