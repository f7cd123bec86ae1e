"""Version 3 of the SageMaker SDK for tests, in a virtual environment that ends with them.

Versions 2 and 3 have one distribution name, so they cannot be in one environment.
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

# An interpreter that has it already, for those who repeat tests.
VARIABLE = "LIGHTNING_SM_TEST_SDK3"
# sagemaker-train is the part of version 3 that trains; the rest is what lightning-sm submit imports, which comes by
# PYTHONPATH, without torch.
_REQUIREMENTS = ("sagemaker-train>=1.27,<2", "msgspec>=0.19,<1", "psutil>=5.9,<8", "PyYAML>=5.4,<7", "rich>=13.7,<16")
_TIMEOUT_S = 900


@contextmanager
def sdk3_environment(shared: Path) -> Iterator[Path]:
    """Provide the interpreter of an environment with version 3, or skip the test if it cannot be installed.

    Args:
        shared: A folder of all workers of pytest-xdist: the first one installs, and the last one removes.
    """
    stated = os.environ.get(VARIABLE)
    if stated:
        yield Path(stated)
        return
    folder = shared / "sdk3"
    # Who installs or removes holds one lock for as long as that takes; users share the other one to the end of their
    # tests, when whoever then has it alone removes the environment.
    with (shared / "sdk3.lock").open("w") as change, (shared / "sdk3.users").open("w") as users:
        fcntl.flock(change, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            _install(folder)
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
    """The scripts that version 3 puts into a job.

    Args:
        python: The interpreter of its environment.
    """
    (found,) = (python.parents[1] / "lib").glob("python3*/site-packages/sagemaker/train/container_drivers")
    return found


def _install(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *_REQUIREMENTS]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
            pytest.skip(f"needs version 3 of the SageMaker SDK, which cannot be installed: {last}")
    (folder / ".ready").touch()
