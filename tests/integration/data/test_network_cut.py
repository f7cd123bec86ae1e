"""A trainer and data hosts in separate network namespaces, whose links are cut and restored."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys

import pytest

from lightning_sm.job.variables import JOB_SECRET
from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.quick_processes import python_path

_IP = shutil.which("ip")

pytestmark = [
    pytest.mark.proof,
    pytest.mark.processes,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces"),
    pytest.mark.skipif(_IP is None, reason="needs ip (Debian package iproute2)"),
]

# A silent host is given up after two heartbeats of one second each, half a second apart.
LONGEST_GAP_S = 8.0
# The other host also has to start its worker.
LONGEST_REPLACEMENT_S = 20.0
# TCP retries at growing intervals.
LONGEST_ADOPTION_S = 20.0
# Promised for a trainer that a data host does not trust.
LONGEST_REFUSAL_S = 30.0


def ip(*arguments):
    """Configure the network."""
    subprocess.run([_IP, *arguments], check=True, capture_output=True, timeout=30)


class Network:
    """Namespaces with one ``eth0`` each, joined by a bridge in another namespace.

    Args:
        size: Number of namespaces.
    """

    def __init__(self, size):
        self._prefix = f"lsm-{secrets.token_hex(3)}"
        self._switch = f"{self._prefix}-switch"
        self.addresses = [f"10.78.0.{number + 1}:7000" for number in range(size)]
        self._made = []

    def __enter__(self):
        spaces = [self._space(number) for number in range(len(self.addresses))]
        for space in (self._switch, *spaces):
            ip("netns", "add", space)
            self._made.append(space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge0", "up")
        for number, space in enumerate(spaces):
            port = ("name", f"port{number}", "netns", self._switch)
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", *port)
            ip("-n", space, "address", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge0", "up")
        return self

    def __exit__(self, *_):
        for space in self._made:
            ip("netns", "delete", space)

    def _space(self, number):
        return f"{self._prefix}-{number}"

    def wire(self, number, state):
        """Cut a namespace's link ("down"), unnoticed by either end of a connection, or restore it ("up")."""
        ip("-n", self._switch, "link", "set", f"port{number}", state)

    @contextlib.contextmanager
    def process(self, number, *arguments, stderr=None):
        """Run a trainer or a data host in a namespace."""
        command = [_IP, "netns", "exec", self._space(number), sys.executable, str(SCRIPTS / "across_the_network.py")]
        env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
        env[JOB_SECRET.name] = "of both ends " * 4
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        with subprocess.Popen([*command, *arguments], env=env, **pipes) as process:
            try:
                yield process
            finally:
                process.stdin.close()
                process.wait(timeout=60)


def error_of(trainer):
    """Return the error that a trainer got: its name, after how many seconds, and its text."""
    name, seconds, text = re.match(r"(\w+) after ([\d.]+): (.*)", trainer.stdout.readline()).groups()
    return name, float(seconds), text


def test_a_cut_network_is_survived_and_healed():
    """With one of two hosts cut off, the epoch continues, bit for bit; a reconnected host can replace the other one.

    With both hosts cut off, the error names both.
    """
    with Network(3) as network, contextlib.ExitStack() as stack:
        trainer_number, data_numbers = 0, (1, 2)
        addresses = [network.addresses[number] for number in data_numbers]
        hosts = [
            stack.enter_context(network.process(number, "serve", network.addresses[number], "10.78.0.1"))
            for number in data_numbers
        ]
        assert [host.stdout.readline() for host in hosts] == ["listening\n"] * 2
        trainer = stack.enter_context(network.process(trainer_number, "train", *addresses))

        def obey(wanted, state, number):
            assert trainer.stdout.readline() == f"{wanted}\n"
            network.wire(number, state)
            trainer.stdin.write("\n")
            trainer.stdin.flush()

        obey("cut one", "down", 2)
        obey("heal", "up", 2)
        obey("cut the other", "down", 1)
        assert trainer.stdout.readline() == "same True steps 200\n"
        numbers = re.match(
            r"longest ([\d.]+) adopted in ([\d.]+) replaced in ([\d.]+)", trainer.stdout.readline()
        ).groups()
        longest, adoption, replacement = map(float, numbers)
        assert longest < LONGEST_GAP_S
        assert adoption < LONGEST_ADOPTION_S
        assert replacement < LONGEST_REPLACEMENT_S
        obey("cut the last", "down", 2)
        name, seconds, text = error_of(trainer)
        assert name == "DataHostUnreachableError"
        assert 6 <= seconds < 30
        assert all(address in text for address in addresses)


def test_a_trainer_from_an_unknown_address_is_refused_by_name():
    """Within 30 s, the trainer names its address and the setting, and the data host logs what it trusts."""
    serve = ("serve", "10.78.0.2:7000", "10.78.0.9")
    with Network(2) as network, network.process(1, *serve, stderr=subprocess.PIPE) as host:
        assert host.stdout.readline() == "listening\n"
        with network.process(0, "refused", network.addresses[1]) as trainer:
            name, seconds, text = error_of(trainer)
        assert name == "DataHostMismatchError"
        assert seconds < LONGEST_REFUSAL_S
        assert "does not trust the address of this trainer, 10.78.0.1" in text
        assert "add 10.78.0.1 to data_service.trust of the data hosts" in text
        host.stdin.close()
        log = host.stderr.read()
    assert (
        "Refused a connection: the data host does not trust 10.78.0.1. It trusts its own machine, 10.78.0.9. "
        "If 10.78.0.1 is a trainer, add it to data_service.trust"
    ) in log
