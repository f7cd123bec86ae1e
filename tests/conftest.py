"""Guards around every test: fail on forbidden skips, and on leftover processes and threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from xdist.workermanage import NodeManager

from tests import quick_processes
from tests.sdk import sdk_environment
from tests.tiers import mark_tiers

# On a busy machine, any example may exceed Hypothesis's deadline of 200 ms. Benchmarks measure speed, not tests.
settings.register_profile("lightning_sm", deadline=None)
settings.load_profile("lightning_sm")
# Workers of pytest-xdist and emulated hosts share the cores. With more threads than cores, the threads of a process
# wait for each other: an epoch of 20 s took more than four minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A report would take seconds at the end of each job. Tests of reports turn it on.
os.environ.setdefault("LIGHTNING_SM_REPORT_S", "0")
# Hide the user's AWS credentials, so that no test can send anything to AWS.
for _name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[_name]
os.environ |= {"AWS_EC2_METADATA_DISABLED": "true"} | dict.fromkeys(
    ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull
)
# Do this before anything imports Lightning. Processes that tests start need it, too; pytest-xdist's workers inherit it.
if str(quick_processes.FOLDER) not in sys.path:
    from tests.quick_processes import sitecustomize  # noqa: F401

    sys.path.append(str(quick_processes.FOLDER))
    os.environ["PYTHONPATH"] = quick_processes.python_path(*filter(None, [os.environ.get("PYTHONPATH")]))

_TESTS = Path(__file__).parent
_NO_SKIPS = "LIGHTNING_SM_TEST_NO_SKIPS"


def pytest_configure() -> None:
    """Restore the default signal handlers: in the background or under nohup, tests would inherit ignored signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # After Ctrl-C, xdist kills workers that do not exit within 10 s, but removing an engine's folder takes longer.
    NodeManager.EXIT_TIMEOUT = 120


# This must run first, because xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that share the Docker engine, or the fixtures of a file, in one worker of pytest-xdist."""
    mark_tiers(items)
    for item in items:
        path = item.path.relative_to(_TESTS).as_posix()
        if path.startswith("containers/"):
            item.add_marker(pytest.mark.xdist_group("containers"))
        elif not path.startswith("unit/"):
            item.add_marker(pytest.mark.xdist_group(path))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, None, None]:
    """Turn skips into failures if LIGHTNING_SM_TEST_NO_SKIPS is set, as on CI, which has everything that tests need."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get(_NO_SKIPS) and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped while {_NO_SKIPS} is set: {reason}"


@pytest.fixture(scope="session")
def sdk2_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide an interpreter with version 2 of the SageMaker SDK."""
    with sdk_environment(2, _shared(tmp_path_factory)) as python:
        yield python


@pytest.fixture(scope="session")
def sdk3_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide an interpreter with version 3 of the SageMaker SDK."""
    with sdk_environment(3, _shared(tmp_path_factory)) as python:
        yield python


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    """Undo the process-wide settings of training runs in this process."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)
    if lightning := sys.modules.get("lightning_sm._lightning"):
        lightning.rank_zero_only.rank = 0


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """Fail a test that leaves a process or a thread behind."""
    threads = set(threading.enumerate())
    # Children of longer-lived fixtures may run on, and so may the processes that they start during the test.
    before = psutil.Process().children()
    yield
    running = _descendants(psutil.Process())
    # List the fixtures' processes last: a fixture's data host may have replaced a worker after the first listing.
    known = {*before, *(child for process in before if process.is_running() for child in _descendants(process))}
    processes = [process for process in running if process not in known]
    _, alive = psutil.wait_procs(processes, timeout=20)
    commands = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            commands.append(" ".join(process.cmdline()))
            process.kill()
    assert not commands, f"processes left behind: {commands}"
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    assert not left, f"threads left behind: {left}"
