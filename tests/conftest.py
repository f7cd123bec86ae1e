"""Guards around every test: no skips where none are allowed, nothing left behind."""

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

# On a busy machine any example may take longer than Hypothesis's 200 ms; speed is measured in benchmarks.
settings.register_profile("lightning_sm", deadline=None)
settings.load_profile("lightning_sm")
# Workers of pytest-xdist and hosts of emulated jobs share the cores. Threads that find none keep the others of their
# process waiting: an epoch of 20 s took more than four minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A report takes seconds at the end of each job; the tests of reports ask for them.
os.environ.setdefault("LIGHTNING_SM_REPORT_S", "0")
# Nothing is ever sent to AWS: no test finds the credentials of whoever runs it.
for _name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[_name]
os.environ |= {"AWS_EC2_METADATA_DISABLED": "true"} | dict.fromkeys(
    ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull
)
# Before anything imports Lightning, and for the processes that tests start; workers of pytest-xdist inherit it.
if str(quick_processes.FOLDER) not in sys.path:
    from tests.quick_processes import sitecustomize  # noqa: F401

    sys.path.append(str(quick_processes.FOLDER))
    os.environ["PYTHONPATH"] = quick_processes.python_path(*filter(None, [os.environ.get("PYTHONPATH")]))

_TESTS = Path(__file__).parent
_NO_SKIPS = "LIGHTNING_SM_TEST_NO_SKIPS"


def pytest_configure() -> None:
    """Take signals as usual: what was started in the background, or by nohup, ignores some, and so would the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # After Ctrl-C xdist kills a worker that is not gone within 10 s; to remove an engine's folder takes longer.
    NodeManager.EXIT_TIMEOUT = 120


# First, as xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what shares a resource in one worker of pytest-xdist: the Docker engine, the fixtures of a file."""
    mark_tiers(items)
    for item in items:
        path = item.path.relative_to(_TESTS).as_posix()
        if path.startswith("containers/"):
            item.add_marker(pytest.mark.xdist_group("containers"))
        elif not path.startswith("unit/"):
            item.add_marker(pytest.mark.xdist_group(path))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, None, None]:
    """Turn a skip into a failure where everything that a test may need is supposed to be there."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get(_NO_SKIPS) and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped while {_NO_SKIPS} is set: {reason}"


@pytest.fixture(scope="session")
def sdk2_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An interpreter with version 2 of the SageMaker SDK."""
    with sdk_environment(2, _shared(tmp_path_factory)) as python:
        yield python


@pytest.fixture(scope="session")
def sdk3_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An interpreter with version 3 of the SageMaker SDK."""
    with sdk_environment(3, _shared(tmp_path_factory)) as python:
        yield python


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    """Undo what a training in this process sets for the whole of it."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """Fail a test that leaves a process or a thread behind."""
    threads = set(threading.enumerate())
    # Those of fixtures that live longer than a test, and what they start meanwhile.
    before = psutil.Process().children()
    yield
    running = _descendants(psutil.Process())
    # Looked up last: a data host of a fixture may replace a worker meanwhile.
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
