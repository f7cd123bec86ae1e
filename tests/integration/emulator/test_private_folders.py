"""Folders of emulated jobs on a shared machine: other users can neither read them nor change what a job runs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.emulators import SCRIPT_START, TIMEOUT_S

_OTHER = 65534
_AS_OTHER = f"os.setgroups([]); os.setresgid({_OTHER}, {_OTHER}, {_OTHER}); os.setresuid({_OTHER}, {_OTHER}, {_OTHER})"
_NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A temporary folder like ``/tmp``: everybody may write there, but nobody may replace another user's files."""
    folder = Path(tempfile.mkdtemp(prefix="shared"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def parent(shared: Path) -> Path:
    """The default parent of this user's runs, which does not exist yet."""
    return shared / f"lightning-sm-{os.getuid()}"


def _local(shared: Path, work: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_sm", "local", *args],
        cwd=work,
        env={**os.environ, "TMPDIR": str(shared)},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def _make_as_other(path: Path, mode: int) -> None:
    code = f"import os; {_AS_OTHER}; os.mkdir({str(path)!r}); os.chmod({str(path)!r}, {mode})"
    subprocess.run([sys.executable, "-c", code], check=True)


def _make_for_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _make_link(path: Path) -> None:
    path.symlink_to(tempfile.mkdtemp(dir=path.parent))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        pytest.param(lambda path: _make_as_other(path, 0o777), f"drwxrwxrwx and owner id {_OTHER}", marks=_NEEDS_ROOT),
        pytest.param(lambda path: _make_as_other(path, 0o755), f"drwxr-xr-x and owner id {_OTHER}", marks=_NEEDS_ROOT),
        (_make_for_all, f"drwxrwxrwx and owner id {os.getuid()}"),
        (_make_link, f"lrwxrwxrwx and owner id {os.getuid()}"),
    ],
    ids=["foreign", "foreign and readable", "writable", "link"],
)
def test_a_default_folder_that_others_control_is_refused(
    shared: Path, parent: Path, work: Path, make: Callable[[Path], None], problem: str
) -> None:
    """The error says who could change what the job runs, and names the option for another folder."""
    (work / "train.py").write_text("print('started')")
    make(parent)
    ended = _local(shared, work, "train.py")
    assert ended.returncode == 2
    assert f"{parent}, the default folder for runs, has mode {problem}" in ended.stderr
    assert "--base-dir" in ended.stderr
    assert "started" not in ended.stdout


@_NEEDS_ROOT
@pytest.mark.parametrize("is_default", [True, False])
def test_another_user_reads_nothing_of_a_run(shared: Path, work: Path, is_default: bool) -> None:
    """Another user can read neither the hyperparameters nor the log of a running job, even with --base-dir."""
    (work / "h.yaml").write_text("api_key: S3CR3T")
    (work / "train.py").write_text(
        SCRIPT_START
        + f"if os.fork() == 0:\n    {_AS_OTHER}\n"
        + "    for name in ('input/config/hyperparameters.json', 'output/log.txt'):\n"
        + "        try:\n            found = open(base + '/' + name).read()\n"
        + "        except PermissionError:\n            found = 'refused'\n"
        + "        print(name, found, flush=True)\n    os._exit(0)\nos.wait()"
    )
    options = [] if is_default else ["--base-dir", str(shared / "jobs")]
    ended = _local(shared, work, *options, "--hyperparameters", "h.yaml", "--", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "input/config/hyperparameters.json refused" in ended.stdout
    assert "output/log.txt refused" in ended.stdout
    assert "S3CR3T" not in ended.stdout


def test_hyperparameters_are_for_their_owner_whatever_the_umask(shared: Path, parent: Path, work: Path) -> None:
    """Only the owner can read a run, even with umask 0 and in an older parent folder that others could read."""
    parent.mkdir(0o755)
    (work / "train.py").write_text(SCRIPT_START)
    before = os.umask(0)
    try:
        assert _local(shared, work, "train.py").returncode == 0
    finally:
        os.umask(before)
    (run,) = parent.iterdir()
    file = run / "algo-1" / "input" / "config" / "hyperparameters.json"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (parent, run, file)]
    assert modes == [0o700, 0o700, 0o600]
