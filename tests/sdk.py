"""The SageMaker SDKs, each in a virtual environment that is removed after the tests.

Versions 2 and 3 share a distribution name, so they cannot be in one environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# sagemaker-train is the training part of version 3.
REQUIREMENTS = {2: "sagemaker[local]>=2.257.1,<3", 3: "sagemaker-train>=1.27,<2"}
_TIMEOUT_S = 900


@contextmanager
def sdk_environment(version: int, shared: Path) -> Iterator[Path]:
    """Provide the interpreter of an environment with an SDK, or skip the test if it cannot be installed.

    To save time when repeating tests, set ``LIGHTNING_SM_TEST_SDK2`` and ``LIGHTNING_SM_TEST_SDK3`` to interpreters
    that already have the SDK.

    Args:
        version: 2 or 3.
        shared: Folder shared by all workers of pytest-xdist. The first worker installs, and the last one removes.
    """
    interpreter = os.environ.get(f"LIGHTNING_SM_TEST_SDK{version}")
    if interpreter:
        yield Path(interpreter)
        return
    folder = shared / f"sdk{version}"
    # A worker that installs or removes the environment holds the first lock meanwhile. Workers share the second lock
    # until the end of their tests; a worker that can then lock it exclusively removes the environment.
    with folder.with_suffix(".lock").open("w") as change, folder.with_suffix(".users").open("w") as users:
        fcntl.flock(change, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            _install(version, folder)
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(change, fcntl.LOCK_UN)
        try:
            yield folder / "bin" / "python"
        finally:
            fcntl.flock(change, fcntl.LOCK_EX)
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # another worker still uses it
            else:
                shutil.rmtree(folder)


def drivers_of(python: Path) -> Path:
    """Return the folder of the scripts that version 3 adds to a job.

    Args:
        python: Interpreter of the SDK's environment.
    """
    (folder,) = (python.parents[1] / "lib").glob("python3*/site-packages/sagemaker/train/container_drivers")
    return folder


def _install(version: int, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, REQUIREMENTS[version]]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
            pytest.skip(f"needs version {version} of the SageMaker SDK, which cannot be installed: {last}")
    (folder / ".ready").touch()
