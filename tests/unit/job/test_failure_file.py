"""Failure files: how a process that dies of an exception reports it to its launcher."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lightning_sm import errors
from lightning_sm.job.failure_file import (
    ProcessFailure,
    followed_from_another,
    read_failures,
    report_failures,
    would_recur,
)
from lightning_sm.job.variables import CONTROL_DIR
from tests.fakes.process_state import restored_process


class DistBackendError(RuntimeError):
    """An exception with the name and module of torch's."""


DistBackendError.__module__ = "torch.distributed"


class SIGTERMException(SystemExit):
    """An exception with the name of Lightning's."""


def died(folder, source):
    """Run a script that reports failures; return the finished process and the failure it reported."""
    folder.mkdir()
    start = "import os, sys\nfrom lightning_sm.job.failure_file import report_failures\nreporter = report_failures()\n"
    script = folder.parent / "train.py"
    script.write_text(start + source)
    env = {CONTROL_DIR.name: str(folder), "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, check=False, timeout=60)
    ((_, failure),) = read_failures(folder).items()
    return ended, failure


def test_an_exception_is_described(tmp_path):
    """The report holds type, multi-line message, frames and rank; Python prints the traceback as usual."""
    source = "reporter.rank = lambda: 3\ndef f():\n    raise ValueError('bad shape\\nof two')\nf()\n"
    ended, failure = died(tmp_path / "control", source)
    assert ended.returncode == 1
    assert b"\nValueError: bad shape\nof two\n" in ended.stderr
    assert failure.rank == 3
    assert failure.lines == ("ValueError: bad shape", "of two")
    assert failure.frames[-1].startswith(f'File "{tmp_path}/train.py", line 6, in f: raise ValueError(')
    assert not any((failure.is_consequence, failure.is_permanent, failure.is_passed_on))


@pytest.mark.parametrize(
    "source",
    [
        "os._exit(9)",
        "sys.exit(9)",
        "os.kill(os.getpid(), 9)",
        # The exception is caught and logged.
        "import traceback\ntry:\n    import no_kernel\nexcept ImportError:\n    traceback.print_exc()\nsys.exit(1)",
        # The exception is raised in a background thread.
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nsys.exit(1)",
        # The exception is raised in a child process.
        "if not os.fork():\n    raise ValueError('of the child')\nos.wait()\nsys.exit(9)",
        # The exception is reported early, and then caught by the script.
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    reporter.report(error)\nsys.exit(9)",
    ],
)
def test_without_an_exception_that_ends_it_a_process_says_nothing(tmp_path, source):
    """The failure file stays empty if the process was killed or exited without an exception."""
    ended, failure = died(tmp_path / "control", source)
    assert ended.returncode != 0
    assert failure is None


def test_torchruns_file_is_there_only_for_an_exception_that_ends_the_process(tmp_path):
    """The file exists only while an exception is reported: an empty one breaks torchrun, others count as the reason."""
    file = tmp_path / "error.json"
    with restored_process():
        reporter = report_failures({"TORCHELASTIC_ERROR_FILE": str(file)})
        assert not file.exists()
        reporter.report(ValueError("caught"))
        assert json.loads(file.read_bytes())["message"]["message"] == "ValueError: caught"
        reporter.withdraw()
    assert list(tmp_path.iterdir()) == []
    assert report_failures({"TORCHELASTIC_ERROR_FILE": ""}) is None


def test_on_a_full_disk_the_traceback_is_the_reason(tmp_path):
    """Python still prints the traceback, after a line that names the file, and no empty report remains."""
    (folder := tmp_path / "control").mkdir()
    # A file size limit of 0 bytes simulates the full disk.
    source = (
        "import resource\n"
        "from lightning_sm.job.failure_file import report_failures\n"
        "report_failures()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "raise ValueError('of the script')\n"
    )
    env = {CONTROL_DIR.name: str(folder), "PYTHONPATH": ":".join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, check=False, timeout=60)
    first, *_, last = ended.stderr.decode().splitlines()
    assert "cannot be written: [Errno 27] File too large" in first
    assert (ended.returncode, last) == (1, "ValueError: of the script")
    assert ended.stderr.count(b"Traceback") == 1
    assert list(folder.iterdir()) == []


def test_what_a_newer_version_adds_to_a_report_is_ignored(tmp_path):
    """The launcher runs the image's version of this package, but the script may run a newer one from the job's code."""
    failure = ProcessFailure(1, 2.0, ("ValueError: x",), ())
    (tmp_path / "failure-7.json").write_bytes(failure.encode().replace(b"{", b'{"added":0,', 1))
    assert read_failures(tmp_path) == {7: failure}


def test_an_exception_that_was_reported_early_is_printed_once(tmp_path):
    """An exception is printed once, even if a rank printed it before its exit, as after a failure in ``fit``."""
    source = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
    source += "    sys.excepthook(type(error), error, error.__traceback__)\n    raise\n"
    ended, failure = died(tmp_path / "control", source)
    assert ended.stderr.count(b"ZeroDivisionError: ") == 1
    assert failure.lines == ("ZeroDivisionError: division by zero",)


def test_a_signal_that_ends_a_failing_process_hides_no_exception(tmp_path):
    """A signal does not hide an exception, which may have ended the job on another host before this process exits."""
    source = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    reporter.report(error)\n"
    source += "    reporter.keep()\n    sys.exit(143)\n"
    ended, failure = died(tmp_path / "control", source)
    assert ended.returncode == 143
    assert failure.lines == ("ZeroDivisionError: division by zero",)


def test_a_hook_that_replaces_ours_hides_nothing(tmp_path):
    """The exception is reported even if a library replaces the exception hook without calling the previous one."""
    _, failure = died(tmp_path / "control", "sys.excepthook = lambda *_: None\n1 / 0\n")
    assert failure.lines == ("ZeroDivisionError: division by zero",)


def test_handlers_at_exit_see_a_failure_first(tmp_path):
    """A failing process can cancel exit handlers before they run."""
    source = "import atexit\natexit.register(print, 'left')\n"
    source += "reporter.on_failure = lambda: atexit.unregister(print)\n1 / 0\n"
    ended, _ = died(tmp_path / "control", source)
    assert ended.stdout == b""


def caught(function):
    """Return the exception that a function raises."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - whatever it raises is what is wanted
        return error
    raise AssertionError(function)


def chained(first, last):
    """Return the last exception, raised while the first one was being handled."""

    def raise_both():
        try:
            raise first
        except type(first):
            raise last  # noqa: B904 - as where a handler fails

    return caught(raise_both)


LOST = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"


def test_of_a_chain_the_last_that_is_no_consequence_counts():
    """The last exception of a chain is reported, unless it is a consequence, such as a lost peer."""
    assert ProcessFailure.of(chained(KeyError("a"), ValueError("no a"))).lines == ("ValueError: no a",)
    failure = ProcessFailure.of(chained(ValueError("a bad sample"), RuntimeError(LOST)))
    assert (failure.lines, failure.is_consequence) == (("ValueError: a bad sample",), False)
    assert ProcessFailure.of(RuntimeError(LOST)).is_consequence


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError(LOST), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (SIGTERMException(), True),
        (KeyboardInterrupt(), True),
        (DistBackendError("NCCL error in: NCCLUtils.hpp\nncclRemoteError: A call failed\nLast error:"), True),
        (DistBackendError("NCCL error in: NCCLUtils.hpp\nncclUnhandledCudaError: out of memory"), False),
        (ValueError(LOST), False),
        (errors.DataHostUnreachableError("all"), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), False),
    ],
)
def test_consequences(error, is_one):
    """A lost peer or a requested exit is a consequence; an exception that only quotes one is not."""
    assert followed_from_another(error) is is_one


@pytest.mark.parametrize(
    ("error", "would"),
    [
        (ModuleNotFoundError("x"), True),
        (IndentationError("x"), True),
        (errors.JobConfigError("no hosts"), True),
        (errors.MixedLightningError("both"), True),
        (errors.NeedsLinuxError("memfd"), True),
        (errors.ResumeError("other data"), True),
        (errors.RemoteImportError("ModuleNotFoundError: x"), True),
        (ValueError("NaN"), False),
        (errors.DataTimeoutError("no batch"), False),
        (errors.HostResolutionError("algo-1"), False),
        (errors.PortInUseError("20000"), False),
        (errors.CheckpointError("damaged"), False),
        (errors.RemoteTransformError("ValueError: sample 3"), False),
    ],
)
def test_what_would_recur(error, would):
    """Import errors and contradictory job settings would recur; the exception's type decides."""
    assert would_recur(error) is would


def test_an_exception_of_a_worker_process_is_preferred_to_its_messenger():
    """The worker's exception comes first, followed by torch's, which carries the worker's traceback in its message."""
    message = (
        "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/code/data.py", line 7, in __getitem__\n    open(path)\nOSError: no such image\n'
    )
    failure = ProcessFailure.of(OSError(message))
    assert failure.lines == ("OSError: no such image", "OSError: Caught OSError in DataLoader worker process 0.")
    assert failure.frames == ('File "/code/data.py", line 7, in __getitem__: open(path)',)


def test_an_exception_of_a_data_host_is_the_users_own():
    """An exception from a data host is reported with the sample, the data host and the frames from there."""
    message = (
        "ValueError: sample 40 is corrupt\non data host algo-3, worker 0: index 40, batch of step 5\n"
        'Traceback (most recent call last):\n  File "/code/images.py", line 9, in __getitem__\n    raise ValueError\n'
        "ValueError: sample 40 is corrupt"
    )
    failure = ProcessFailure.of(errors.RemoteTransformError(message))
    assert failure.lines == tuple(message.splitlines()[:2])
    assert failure.frames == ('File "/code/images.py", line 9, in __getitem__: raise ValueError',)
    assert failure.is_passed_on


def test_a_syntax_error_names_file_and_line():
    """A syntax error is reported with the file and line that Python prints before it."""
    failure = ProcessFailure.of(caught(lambda: compile("x = 1\ndef f(:\n", "/code/model.py", "exec")))
    assert failure.lines == ("SyntaxError: invalid syntax",)
    assert failure.frames[-1] == 'File "/code/model.py", line 2: def f(:'
    assert failure.is_permanent
