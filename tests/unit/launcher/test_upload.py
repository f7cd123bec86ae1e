"""How a launcher follows the upload of checkpoints: while the script runs, and after an interruption."""

import os
import threading
import time

import pytest

from lightning_sm.launcher import upload
from lightning_sm.launcher.upload import UploadWatch, wait_until_uploaded


@pytest.fixture
def file(tmp_path):
    """A checkpoint that has not been uploaded."""
    path = tmp_path / "interrupted-epoch=1-step=7.ckpt"
    path.write_bytes(b"weights")
    return path


def _mark(file, state):
    file.with_name(f"{file.name}.sagemaker-{state}").touch()


def _never():
    return time.monotonic() + 60


def test_nothing_is_waited_for_without_an_agent(file):
    """Without an upload agent, as on a laptop, the launcher does not wait."""
    began = time.monotonic()
    assert wait_until_uploaded([file], has_agent=False, deadline=_never)
    assert wait_until_uploaded([], has_agent=True, deadline=_never)
    assert time.monotonic() - began < 10


def test_all_files_are_waited_for(file, caplog):
    """The launcher waits for the markers of all files, which the agent writes one after the other."""
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
    """A file rewritten after its upload counts as not uploaded, and the log reports this at the deadline."""
    _mark(file, "uploaded")
    marker = file.with_name(f"{file.name}.sagemaker-uploaded")
    os.utime(marker, (0, 0))
    deadline = time.monotonic() + 0.3
    assert not wait_until_uploaded([file], has_agent=True, deadline=lambda: deadline)
    assert f"SageMaker has not uploaded {file}." in caplog.text


def test_the_first_marker_is_waited_for_in_a_job(file, monkeypatch):
    """The agent gets a moment to notice a job's first checkpoint; without a marker, the launcher then stops waiting."""
    monkeypatch.setattr(upload.timeline, "FIRST_MARKER_S", 0.2)
    assert wait_until_uploaded([file], has_agent=True, deadline=_never)
    thread = threading.Timer(0.05, lambda: (_mark(file, "uploading"), _mark(file, "uploaded")))
    monkeypatch.setattr(upload.timeline, "FIRST_MARKER_S", 60.0)
    thread.start()
    assert wait_until_uploaded([file], has_agent=True, deadline=_never)
    thread.join()


class TestWatch:
    """The watch while the script runs, with simulated times."""

    @pytest.fixture
    def watch(self, tmp_path):
        """A watch of a folder with an earlier attempt's checkpoint, which has no marker."""
        (tmp_path / "old.ckpt").touch()
        return UploadWatch(tmp_path)

    def test_a_checkpoint_that_is_not_uploaded_is_named_once(self, watch, tmp_path, file, caplog):
        """If the agent stops uploading, one warning names the overdue file, here a shard, and the minutes."""
        _mark(file, "uploaded")
        watch.check(0.0)
        (tmp_path / "next.ckpt").mkdir()
        (shard := tmp_path / "next.ckpt" / "__0_0.distcp").touch()
        for now in (60.0, 600.0, 659.0):
            watch.check(now)
        assert caplog.text == ""
        watch.check(660.0)
        assert f"SageMaker has not uploaded the checkpoint {shard} within 10 minutes" in caplog.text
        watch.check(6000.0)
        assert caplog.text.count("has not uploaded") == 1

    def test_an_agent_that_keeps_up_is_not_mentioned(self, watch, file, caplog):
        """A file that is rewritten and uploaded repeatedly is never overdue, and other files are ignored."""
        (file.parent / "events.jsonl").touch()
        for minute in range(30):
            os.utime(file, ns=(minute, minute))
            watch.check(60.0 * minute)
            _mark(file, "uploaded")
            watch.check(60.0 * minute + 30)
        assert caplog.text == ""

    def test_without_an_agent_it_is_silent(self, watch, file, caplog):
        """If nothing has ever been uploaded, nothing is logged: the job is emulated, or its agent writes no markers."""
        for now in (0.0, 6000.0):
            watch.check(now)
        assert caplog.text == ""

    def test_it_looks_once_a_minute(self, watch, monkeypatch):
        """It looks once a minute, even if a folder disappears during a look; without a folder it never looks."""
        looks, began = [], time.monotonic()

        def check(now):
            looks.append(now)
            raise FileNotFoundError

        monkeypatch.setattr(watch, "check", check)
        for second in range(130):
            watch.look(began + second)
        assert 59 <= looks[1] - looks[0] <= 61
        assert len(looks) == 2
        UploadWatch(None).look(began + 1000)
