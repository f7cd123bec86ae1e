"""Reading on in a record while it is written."""

from lightning_sm.record import events
from lightning_sm.record.events import End, Event, FileHead, HostUse, Recorder, Steps
from lightning_sm.record.tail import RecordTail


def steps(t, n=1, wall_s=0.5):
    """A line of steps."""
    return Steps(t=t, step=int(t), n=n, wall_s=wall_s, longest_s=wall_s)


def test_only_what_is_new_is_read(tmp_path):
    """Lines that were added count once, also one whose second half comes later; a torn one is left out."""
    path = tmp_path / "1" / "algo-1-rank-0.jsonl"
    recorder = Recorder(path)
    recorder.append(FileHead(t=0.0, host="algo-1", who="rank-0"))
    recorder.append(steps(1.0))
    tail = RecordTail()
    (writer,) = tail.read({tmp_path, tmp_path / "missing"})
    assert (tail.attempt, writer.head.host, [line.t for line in writer.newest(Steps)]) == (1, "algo-1", [1.0])
    text = events.to_json(steps(2.0))
    with path.open("a") as file:
        file.write(text[:20])
        file.flush()
        assert [line.t for line in tail.read({tmp_path})[0].newest(Steps)] == [1.0]
        file.write(text[20:] + "\n")
    (writer,) = tail.read({tmp_path})
    assert [line.t for line in writer.newest(Steps)] == [1.0, 2.0]
    recorder.append(HostUse(t=3.0, cpu=0.5, memory_bytes=1, memory_total_bytes=2))
    recorder.append(Event(t=3.0, what="resumed"))
    recorder.append(End(t=4.0, outcome="succeeded"))
    (writer,) = tail.read({tmp_path})
    (use,), (event,), (end,) = (writer.newest(kind) for kind in (HostUse, Event, End))
    assert (use.cpu, event.what, end.outcome) == (0.5, "resumed", "succeeded")
    recorder.close()


def test_rates_look_back_a_few_seconds(tmp_path):
    """Old lines do not count, but the newest one always does."""
    recorder = Recorder(tmp_path / "1" / "algo-1-rank-0.jsonl")
    recorder.append(FileHead(t=0.0, host="algo-1", who="rank-0"))
    for t in (1.0, 50.0, 60.0):
        recorder.append(steps(t))
    recorder.close()
    (writer,) = RecordTail().read({tmp_path})
    assert [line.t for line in writer.recent_steps()] == [50.0, 60.0]


def test_another_attempt_starts_anew(tmp_path):
    """Files of earlier attempts are left aside; a process that starts again goes on with its file."""
    for attempt, host in (("1", "algo-1"), ("2", "algo-2")):
        recorder = Recorder(tmp_path / attempt / f"{host}-launcher.jsonl")
        recorder.append(FileHead(t=0.0, host=host, who="launcher"))
        recorder.append(End(t=1.0, outcome="interrupted"))
        if attempt == "2":
            recorder.append(FileHead(t=2.0, host=host, who="launcher"))
        recorder.close()
    tail = RecordTail()
    (writer,) = tail.read({tmp_path})
    assert (tail.attempt, writer.head.host, writer.newest(End)) == (2, "algo-2", [])


def test_a_file_that_is_replaced_is_read_from_its_start(tmp_path):
    """As when the emulator makes the folders of a host anew."""
    path = tmp_path / "1" / "algo-1-rank-0.jsonl"
    tail = RecordTail()
    for times in ((1.0, 2.0, 3.0), (9.0,)):
        path.unlink(missing_ok=True)
        recorder = Recorder(path)
        recorder.append(FileHead(t=0.0, host="algo-1", who="rank-0"))
        for t in times:
            recorder.append(steps(t))
        recorder.close()
        (writer,) = tail.read({tmp_path})
        assert [line.t for line in writer.newest(Steps)] == list(times)
