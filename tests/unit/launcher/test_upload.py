"""How long an interrupted host waits for the agent that uploads its checkpoint."""

import os
import threading
import time

import pytest

from lightning_sm.launcher import upload
from lightning_sm.launcher.upload import wait_until_uploaded


@pytest.fixture
def file(tmp_path):
    """A checkpoint that is not uploaded yet."""
    path = tmp_path / "interrupted-epoch=1-step=7.ckpt"
    path.write_bytes(b"weights")
    return path


def _mark(file, state):
    file.with_name(f"{file.name}.sagemaker-{state}").touch()


def _never():
    return time.monotonic() + 60


def test_nothing_is_waited_for_without_an_agent(file):
    """On a laptop nobody uploads anything."""
    began = time.monotonic()
    assert wait_until_uploaded([file], has_agent=False, deadline=_never)
    assert wait_until_uploaded([], has_agent=True, deadline=_never)
    assert time.monotonic() - began < 10


def test_all_files_are_waited_for(file, caplog):
    """The markers of all files, which the agent writes one after the other."""
    caplog.set_level("INFO", logger="lightning_sm")
    other = file.with_name("other.ckpt")
    other.write_bytes(b"")
    _mark(file, "uploading")
    waited = []
    thread = threading.Thread(
        target=lambda: waited.append(wait_until_uploaded([file, other], has_agent=False, deadline=_never))
    )
    thread.start()
    deadline = time.monotonic() + 20
    while "waiting until" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    _mark(file, "uploaded")
    assert not waited
    _mark(other, "uploaded")
    thread.join(20)
    assert waited == [True]
    assert "uploaded after" in caplog.text


def test_a_marker_of_an_earlier_file_does_not_count(file, caplog):
    """A file that was written again is not uploaded yet; at the deadline the log says so."""
    _mark(file, "uploaded")
    marker = file.with_name(f"{file.name}.sagemaker-uploaded")
    os.utime(marker, (0, 0))
    deadline = time.monotonic() + 0.3
    assert not wait_until_uploaded([file], has_agent=True, deadline=lambda: deadline)
    assert f"SageMaker has not uploaded {file}." in caplog.text


def test_the_first_marker_is_waited_for_in_a_job(file, monkeypatch):
    """The agent needs a moment to notice a job's first checkpoint; without one, the host leaves soon."""
    monkeypatch.setattr(upload, "_FIRST_MARKER_S", 0.2)
    assert wait_until_uploaded([file], has_agent=True, deadline=_never)
    thread = threading.Timer(0.05, lambda: (_mark(file, "uploading"), _mark(file, "uploaded")))
    monkeypatch.setattr(upload, "_FIRST_MARKER_S", 60.0)
    thread.start()
    assert wait_until_uploaded([file], has_agent=True, deadline=_never)
    thread.join()
