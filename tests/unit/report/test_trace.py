"""The timeline for Perfetto, with all processes on one clock."""

import json
from itertools import pairwise

from lightning_sm.record.events import Event, HostUse, Span, Steps
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.report.trace import trace
from tests.unit.report.recorded import BEGIN, head, input_bound, write


def of(*folders):
    """Return the trace events of the runs in some folders."""
    return json.loads(trace([Figures(read_run(folder)) for folder in folders]))["traceEvents"]


def processes(events):
    """Return the names of processes by their numbers."""
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def test_ranks_and_data_hosts_are_on_one_clock(tmp_path):
    """Times are microseconds since the first process began; steps do not overlap, and spans have their full length."""
    events = of(input_bound(tmp_path))
    named = processes(events)
    assert sorted(named.values()) == ["algo-1 launcher", "algo-1 rank-0", "algo-2 launcher"]
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert steps[0]["ts"] == 10e6
    assert (steps[0]["dur"], steps[0]["name"], named[steps[0]["pid"]]) == (1e6, "20 steps to 20", "algo-1 rank-0")
    assert steps[0]["args"]["ms of a step"]["data_wait"] == 29.0
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(steps))
    spans = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == 2}
    assert spans == {"startup": (1e6, 5e6), "first batch": (6e6, 4e6), "validation": (70e6, 1e6)}
    used = [event["args"]["CPUs"] for event in events if event["ph"] == "C" and event["name"] == "% in use"]
    assert (min(used), max(used)) == (20.0, 90.0)
    built = [event["args"]["built"] for event in events if event["name"] == "batches of data host algo-2"]
    assert built == list(range(100, 1300, 100))


def test_events_and_ends_are_marked(tmp_path):
    """Events and ends are marked with their text at their time."""
    events = of(input_bound(tmp_path, outcome="failed"))
    marked = [(event["ts"], event["name"], event["args"]["what"]) for event in events if event["ph"] == "i"]
    assert (69e6, "signal", "SIGTERM arrived.") in marked
    assert (72e6, "failed", "ValueError: <b>$x$</b> & so on") in marked


def test_a_restarted_process_goes_on_in_its_track(tmp_path):
    """Restarts and further attempts use the same track; each run starts at 0 under its name."""
    step = Steps(BEGIN + 4, 1, 1, parts={"forward": 1.0})
    for folder, job in (("a", "one"), ("b", "two")):
        write(
            tmp_path / folder,
            head(1, job=job),
            step,
            Event(BEGIN + 5, "hang"),
            head(6, job=job),
            Span(BEGIN + 8, "export", BEGIN + 7, 1.0),
        )
        write(tmp_path / folder, head(100, job=job), HostUse(BEGIN + 101, 0.5, 1, 2), attempt=2)
    events = of(tmp_path / "a", tmp_path / "b")
    assert processes(events) == {1: "one: algo-1 rank-0", 2: "two: algo-1 rank-0"}
    assert [event["ts"] for event in events if event["name"] == "1 step to 1" and event["ph"] == "X"] == [2e6, 2e6]
