"""The resolver of emulated hosts, in a process that finds it on its PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from lightning_sm.emulator.slow_names import resolver_variables
from lightning_sm.emulator.spec import LocalHost
from lightning_sm.job.topology import Role

_LOOK_UP = """
import os, socket, time

def resolves(address):
    try:
        return bool(socket.getaddrinfo(address, None))
    except socket.gaierror:
        return False

print([resolves(f"127.0.0.{number}") for number in (7, 8, 9)], os.environ.get("HIDDEN"))
while not resolves("127.0.0.8"):
    time.sleep(0.01)
print(time.monotonic())
"""


def _look_up(folder, resolves_at, env):
    host = LocalHost("algo-1", "trainer", Role.TRAINER, folder, {"SAGEMAKER_BASE_DIR": str(folder), **env})
    variables = resolver_variables(host, resolves_at)
    ended = subprocess.run(
        [sys.executable, "-c", _LOOK_UP],
        env={**os.environ, **env, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return ended.stdout.splitlines()


def test_an_address_resolves_from_its_time_on(tmp_path):
    """Before that it is unknown, as are the names of hosts that have not started; other addresses always resolve."""
    soon = time.monotonic() + 3.0
    first, resolved_at = _look_up(tmp_path, {"127.0.0.8": soon, "127.0.0.9": soon + 60}, {})
    assert first == "[True, False, False] None"
    assert float(resolved_at) >= soon


def test_a_sitecustomize_of_the_user_is_loaded_too(tmp_path):
    """Python loads only the first one that it finds."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN'] = 'loaded'\n")
    first, _ = _look_up(tmp_path, {}, {"PYTHONPATH": str(tmp_path)})
    assert first == "[True, True, True] loaded"
