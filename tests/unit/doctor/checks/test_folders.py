"""The doctor's checks of folders and of the machine, on temporary folders in the place of /proc, /sys and /dev."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import replace

import pytest

from lightning_sm.doctor.checks import folders, host
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status
from tests.fakes.job_folder import resource_config, write_job

_MASK = f"{1 << (signal.SIGTERM - 1):016x}"
_NO_MASK = "0" * 16


@pytest.fixture
def context(tmp_path):
    """A host of a job whose folders are temporary ones."""
    base = write_job(tmp_path / "ml", resource_config({"trainer": ["algo-1"]}, "algo-1"))
    for name in ("model", "output"):
        (base / name).mkdir()
    return replace(
        Context.of({"SAGEMAKER_BASE_DIR": str(base), "TMPDIR": str(tmp_path)}, 20),
        proc=tmp_path / "proc",
        sys=tmp_path / "sys",
        dev=tmp_path / "dev",
    )


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("free", "status"),
    [
        (0, Status.PROBLEM),
        (499_999_999, Status.PROBLEM),
        (500_000_000, Status.WARNING),
        (4_999_999_999, Status.WARNING),
        (5_000_000_000, Status.OK),
    ],
)
def test_room_on_a_disk(free, status):
    """Below 5 GB is a warning, below 500 MB a problem."""
    assert folders.room_status(free) is status


def test_disk_names_every_folder_once(context):
    """Folders on one file system share a row; one that does not exist yet is looked for above."""
    checkpoints = context.base_dir / "not" / "yet"
    write_job(context.base_dir, checkpoint={"LocalPath": str(checkpoints)})
    (result,) = folders.disk(context)
    for folder in (context.base_dir, context.base_dir / "model", checkpoints, context.env["TMPDIR"]):
        assert str(folder) in result.found
    assert "GiB free" in result.found


def test_writing_leaves_nothing_behind(context):
    """Folders that can be written are named, and nothing is left in them."""
    (result,) = folders.writable(context)
    assert result.status is Status.OK
    assert str(context.base_dir / "model") in result.found
    assert list((context.base_dir / "model").iterdir()) == []


def test_file_in_the_place_of_a_folder_cannot_be_written(context):
    """A folder that cannot be written is a problem of its own."""
    (context.base_dir / "output").rmdir()
    _write(context.base_dir / "output", "a file")
    (result,) = folders.writable(context)
    assert result.status is Status.PROBLEM
    assert str(context.base_dir / "output") in result.found


def test_folder_without_permission_cannot_be_written(context):
    """A user who may not write to the model folder is told so, by number."""
    assert context.job is not None  # read while the folders above may be entered
    (context.base_dir / "model").chmod(0o555)
    user = os.geteuid()
    if user == 0:  # root may write anywhere
        os.seteuid(65534)
    try:
        results = [*folders.writable(context), *folders.disk(context)]
    finally:
        os.seteuid(user)
        (context.base_dir / "model").chmod(0o755)
    assert any(f"{context.base_dir}/model: Permission denied" in result.found for result in results)


def test_leftovers_are_a_warning(context):
    """Files in the model folder and a failure file of another job are named."""
    _write(context.base_dir / "model" / "deep" / "old.ckpt", "")
    _write(context.base_dir / "output" / "failure", "")
    failure, model = folders.leftovers(context)
    assert (failure.status, model.status) == (Status.WARNING, Status.WARNING)
    assert failure.found == f"{context.base_dir}/output/failure exists."
    assert model.found == f"{context.base_dir}/model is not empty: deep/old.ckpt"


def test_checkpoints_are_no_leftovers(context):
    """Files in the checkpoint folder are what a resumed job starts from."""
    _write(context.base_dir / "checkpoints" / "last.ckpt", "")
    write_job(context.base_dir, checkpoint={"S3Uri": "s3://bucket/x"})
    clean, resume = folders.leftovers(context)
    assert (clean.status, resume.status) == (Status.OK, Status.OK)
    assert resume.found == "checkpoint files: 1; the training goes on from the newest sound one"


def test_shared_memory(context):
    """/dev/shm is shown with its size; without one, workers of DataLoader are warned of."""
    (result,) = folders.shared_memory(context)
    assert result.status is Status.WARNING
    (context.dev / "shm").mkdir(parents=True)
    (result,) = folders.shared_memory(context)
    assert "GiB free" in result.found


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/\n", {"memory.max": "2147483648"}),
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "2147483648", "a/b/memory.max": "max"}),
        ("3:cpu:/x\n4:memory:/y\n", {"memory/memory.limit_in_bytes": "2147483648"}),
    ],
)
def test_memory_limit_of_the_container(context, cgroup, files):
    """The smallest limit of this control group and of those around it counts, in both versions."""
    _write(context.proc / "meminfo", "MemTotal:        8388608 kB\n")
    _write(context.proc / "self" / "cgroup", cgroup)
    for name, text in files.items():
        _write(context.sys / "fs" / "cgroup" / name, text)
    (result,) = host.memory(context)
    assert result.found == "2.0 GiB for this container, of 8.0 GiB"


def test_memory_without_a_limit(context):
    """Without a limit, or with one that is none, all of the machine's memory is there."""
    _write(context.proc / "meminfo", "MemTotal:        8388608 kB\n")
    _write(context.proc / "self" / "cgroup", "4:memory:/\n")
    _write(context.sys / "fs" / "cgroup" / "memory" / "memory.limit_in_bytes", "9223372036854771712")
    (result,) = host.memory(context)
    assert result.found == "8.0 GiB"


def test_processes_killed_for_memory_are_a_warning(context):
    """What the kernel killed before is said."""
    _write(context.sys / "fs" / "cgroup" / "memory.events", "low 0\noom 3\noom_kill 2\n")
    _, result = host.memory(context)
    assert result.status is Status.WARNING
    assert "killed 2 processes" in result.found


def test_cpu_quota_is_a_warning(context):
    """A container that sees more CPUs than it gets would start too many threads."""
    assert next(host.processors(context)).status is Status.OK
    _write(context.sys / "fs" / "cgroup" / "cpu.max", "50000 100000")
    (result,) = host.processors(context)
    assert result.status is Status.WARNING
    assert "0.5 of them" in result.found


def test_cpu_quota_of_version_1(context):
    """The older interface says the same in two files."""
    _write(context.proc / "self" / "cgroup", "2:cpu,cpuacct:/\n")
    _write(context.sys / "fs" / "cgroup" / "cpu" / "cpu.cfs_quota_us", "50000")
    _write(context.sys / "fs" / "cgroup" / "cpu" / "cpu.cfs_period_us", "100000")
    (result,) = host.processors(context)
    assert result.status is Status.WARNING


def test_limit_of_open_files(context):
    """The usual limit of a login shell is too low."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        (result,) = host.open_files(context)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert result.status is Status.WARNING
    assert "1024" in result.found


def test_clock_has_an_answer(context):
    """Whatever the kernel says, there is one row, and it says what cannot be known."""
    (result,) = host.clock(context)
    assert any(word in result.found for word in ("unknown", "not known", "cannot be asked"))


def test_system_calls_of_the_data_service_are_tried(context):
    """Where the tests of the data service run, both calls work."""
    (result,) = host.kernel(context)
    assert result.status is Status.OK
    assert "memfd_create and pidfd_open work" in result.found


@pytest.mark.parametrize(
    ("command", "caught", "status"),
    [
        ("python\0lightning-sm\0train", _MASK, Status.OK),
        ("python\0train.py", _NO_MASK, Status.WARNING),
        ("/bin/sh\0-c\0lightning-sm train", _NO_MASK, Status.WARNING),
        ("-bash", _MASK, Status.WARNING),
    ],
)
def test_process_1_must_pass_signals_on(context, command, caught, status):
    """A shell passes none on, and the kernel drops what process 1 does not handle."""
    _write(context.proc / "1" / "cmdline", command)
    _write(context.proc / "1" / "status", f"Name:\tx\nSigCgt:\t{caught}\n")
    (result,) = host.signals(context)
    assert result.status is status
    assert command.partition("\0")[0] in result.found


def test_ignored_sigterm_is_a_warning(context):
    """A SIGTERM that is ignored here is ignored by all that is started from here."""
    _write(context.proc / "self" / "status", f"SigBlk:\t{_NO_MASK}\nSigIgn:\t{_MASK}\n")
    ignored, _ = host.signals(context)
    assert ignored.status is Status.WARNING
    assert "ignored" in ignored.found
