"""A mount namespace for each emulated host, so that no host sees another's files, as on the service.

Each host sees its folder at the same path, like ``/opt/ml``. A path that rank 0 sends to other ranks therefore refers
to *their* files, or to none. Files outside the job's folder (the script, packages, input channels) are shared with the
machine.

``python -m lightning_sm.emulator.own_disk JOB_DIR HOST_DIR COMMAND...`` runs a command in such a namespace. This needs
root, or a kernel that lets unprivileged users create user namespaces.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# linux/sched.h and linux/mount.h
_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 2, 4, 0x20, 0x1000, 0x4000, 0x8_0000
# Holds POSIX semaphores, and memory that a host's processes share.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's name
# The subfolder of the job's folder that every host sees in place of /opt/ml.
_ML = "ml"
_TRIAL_S = 30.0


def base_dir(job_dir: Path, host_dir: Path) -> Path:
    """Return the folder that a host sees in place of ``/opt/ml``.

    Args:
        job_dir: Folder of the job.
        host_dir: Folder of the host in the job's folder, as the emulator sees it.
    """
    return host_dir if obstacle() else job_dir / _ML


def command(job_dir: Path, host_dir: Path, argv: Sequence[str]) -> list[str]:
    """Return a command that runs ``argv`` in a host's mount namespace, or ``argv`` itself if the system allows none.

    Args:
        job_dir: Folder of the job, of which the host sees only ``host_dir``.
        host_dir: Folder of the host in the job's folder.
        argv: The command to run.
    """
    if obstacle():
        return list(argv)
    return [sys.executable, "-m", __spec__.name, str(job_dir), str(host_dir), *argv]


@cache
def obstacle() -> str:
    """Return why hosts cannot each have a mount namespace on this system, or an empty string if they can."""
    with tempfile.TemporaryDirectory() as folder:
        job_dir = Path(folder)
        (job_dir / "host").mkdir()
        (job_dir / "host" / "mine").touch()
        (job_dir / "other").touch()
        seen = ["test", "-e", str(job_dir / _ML / "mine"), "-a", "!", "-e", str(job_dir / "other")]
        argv = [sys.executable, "-m", __spec__.name, str(job_dir), str(job_dir / "host"), *seen]
        trial = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TRIAL_S)
    lines = trial.stderr.strip().splitlines()
    return "" if trial.returncode == 0 else lines[-1] if lines else "mounts have no effect"


def main(argv: Sequence[str]) -> None:
    """Enter a host's namespace, and execute a program there."""
    job_dir, host_dir, *other = argv
    try:
        _enter(Path(job_dir), Path(host_dir))
    except (OSError, AttributeError) as error:  # AttributeError: macOS lacks these calls
        sys.exit(f"no mount namespace: {error}")
    os.execvp(other[0], other)  # noqa: S606 - no shell is needed


def _enter(job_dir: Path, host_dir: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    _call(libc.unshare, _CLONE_NEWNS if uid == 0 else _CLONE_NEWNS | _CLONE_NEWUSER)
    if uid != 0:
        # The kernel lets users map only themselves, and only once they can no longer drop groups (user_namespaces(7)).
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")

    def mount(source: str, target: Path, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
        _call(libc.mount, source.encode(), os.fsencode(target), kind, ctypes.c_ulong(flags), data)

    # Without this, mounts made by root would also appear outside the namespace.
    mount("none", Path("/"), None, _MS_REC | _MS_SLAVE)
    host = os.open(host_dir, os.O_PATH)  # keeps the host's folder reachable while the job's folder is hidden
    options = _MS_NOSUID | _MS_NODEV
    mount("tmpfs", job_dir, b"tmpfs", options, b"mode=0700")  # the mode of the hidden folder
    (job_dir / _ML).mkdir()
    mount(f"/proc/self/fd/{host}", job_dir / _ML, None, _MS_BIND)
    # Make the job's folder read-only, because files that a host writes beside its own folder would be lost silently.
    mount("tmpfs", job_dir, None, options | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    os.close(host)
    if _SHARED_MEMORY.is_dir():
        mount("tmpfs", _SHARED_MEMORY, b"tmpfs", options, b"mode=1777")


def _call(function: object, *args: object) -> None:
    if function(*args) != 0:  # type: ignore[operator]  # ctypes
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")  # type: ignore[attr-defined]  # ctypes


if __name__ == "__main__":
    main(sys.argv[1:])
