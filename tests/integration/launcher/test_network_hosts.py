"""Two hosts in separate network namespaces, joined only by a virtual wire, with the launcher as PID 1."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys

import pytest

from tests.integration.hosts import SCRIPTS, Hosts, run_together

_IP = shutil.which("ip")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces"),
    pytest.mark.skipif(_IP is None, reason="needs ip (Debian package iproute2)"),
]

# Separate namespaces for PIDs, mounts and the host name, with a matching /proc; the test provides /etc/hosts.
_CONTAINER = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
_ENTRY = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


def _ip(*arguments):
    subprocess.run([_IP, *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def network():
    """Two network namespaces, each with an ``eth0``, joined by a bridge in a third; maps host to namespace name."""
    prefix = f"lsm-{secrets.token_hex(3)}"
    switch, spaces = f"{prefix}-switch", {f"algo-{number}": f"{prefix}-{number}" for number in (1, 2)}
    made = []
    try:
        for space in (switch, *spaces.values()):
            _ip("netns", "add", space)
            made.append(space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, space in enumerate(spaces.values(), start=1):
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", switch)
            _ip("-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge0", "up")
        yield spaces
    finally:
        for space in made:
            _ip("netns", "delete", space)


def test_hosts_meet_by_name_over_their_own_interface(network, tmp_path):
    """Hosts that share only a wire train together by host name, and Gloo uses the job's network interface."""
    hyperparameters = {
        "model.schedule": "{'warm': 1, 'cool': 2.5}",
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "False",
        "trainer.logger": "False",
        "trainer.max_epochs": "1",
        "sagemaker_program": "train_with_cli.py",
    }
    hosts = Hosts(tmp_path, interface="eth0", hyperparameters=hyperparameters)
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n10.77.0.1 algo-1\n10.77.0.2 algo-2\n")
    commands = {}
    for host, space in network.items():
        code = hosts.folder / host / "code"
        code.mkdir()
        shutil.copy(SCRIPTS / "train_with_cli.py", code)
        env = hosts.env(host)
        del env["LIGHTNING_SM_HOST_ADDRESSES"]
        container = [_IP, "netns", "exec", space, *_CONTAINER, _ENTRY, str(names), host]
        commands[host] = [*container, sys.executable, "-m", "lightning_sm", "train"], env
    ended = run_together(commands)
    for host in hosts.names:
        assert ended[host].code == 0, ended[host].output
        assert not (hosts.folder / host / "output" / "failure").exists()
    seen = hosts.seen()
    assert [(one["rank"], one["world_size"], one["met"]) for one in seen] == [(0, 2, [0, 1]), (1, 2, [0, 1])]
    assert {(one["address"], one["interface"]) for one in seen} == {("algo-1", "eth0")}
    assert seen[0]["arguments"]["schedule"] == {"warm": 1.0, "cool": 2.5}
