"""How a snapshot of a job is shown: in any width, with any number of hosts, and without colour."""

import io

import pytest
from rich.console import Console

from lightning_sm.top import snapshot
from lightning_sm.top.screen import frame
from lightning_sm.top.snapshot import EventRow, HostRow, Snapshot

GIB = 2**30


def text_of(shown, width=120, height=None, **options):
    """The lines of a frame."""
    file = io.StringIO()
    Console(file=file, width=width, **{"color_system": None, **options}).print(frame(shown, width, height))
    return file.getvalue().splitlines()


def trainer(number, state="training", **facts):
    """A row of a trainer host that trains."""
    known = {
        "instance_type": "ml.g5.xlarge",
        "ranks": 1,
        "step": 1234,
        "epoch": 2,
        "steps_per_s": 12.345,
        "wait_share": 0.24,
        "cpu": 0.5,
        "memory_bytes": 6 * GIB,
        "memory_total_bytes": 16 * GIB,
        "received_bytes_s": 120e6,
        "sent_bytes_s": 1e3,
    }
    return HostRow(f"algo-{number}", "trainer", "trainer", state=state, **{**known, **facts})


def data_host(number, state=snapshot.SERVING, **facts):
    """A row of a data host."""
    known = {"batches_per_s": 205.0, "workers": 4, "busy": 3, "queued": 7}
    return HostRow(f"algo-{number}", "data", "data", state=state, **{**known, **facts})


def job(*hosts, **facts):
    """A snapshot of a job."""
    known = {"seconds": 3725.0, "step": 1234, "epoch": 2, "steps_per_s": 12.345, "samples_per_s": 790.0}
    return Snapshot(1e9, "digits", **{**known, "wait_share": 0.24, "hosts": hosts, **facts})


def test_a_wide_terminal_shows_everything():
    """Each host has its role, state, rate, wait, workers and use."""
    shown = job(
        trainer(1),
        data_host(2),
        attempt=2,
        metrics={"loss": 0.51234, "bad": None},
        events=[EventRow(1e9, "algo-1", "checkpoint_saved", "step 80\nin ck")],
        others=["other"],
    )
    head, values, metrics, titles, first, second, title, event = text_of(shown, 150)
    assert head == "job digits, attempt 2, running for 1 h 2 min; also running here: other"
    assert values == "epoch 2, step 1,234   12.3 steps/s   790 samples/s   waiting for data 24% of the time"
    assert metrics == "loss 0.5123"
    assert titles.split() == [
        *("HOST", "ROLE", "STATE", "STEP", "RATE", "WAIT", "BUSY", "QUEUED", "CPU", "MEMORY", "NETWORK", "TYPE")
    ]
    assert " ".join(first.split()) == (
        "algo-1 trainer + training 1,234 12.3 steps/s 24% 50% 6.44 GB of 17.2 GB in 120, out 0.001 MB/s ml.g5.xlarge"
    )
    assert " ".join(second.split()) == "algo-2 data + serving 205 batches/s 3/4 7"
    assert (title, event) == ("events (UTC)", "01:46:40 algo-1 checkpoint saved: step 80 in ck")


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 120, 200])
def test_no_line_is_longer_than_the_terminal(width):
    """Columns are left out, the least important first; host and state always stay."""
    event = EventRow(1e9, "algo-1", "failure", "long " * 50)
    shown = job(trainer(1), data_host(2, note="long " * 50), events=[event], metrics={"m" * 30: 1.0, "n" * 30: 2.0})
    lines = text_of(shown, width)
    assert max(map(len, lines)) <= width
    assert any("algo-1" in line and "+ training" in line for line in lines)
    titles = next(line for line in lines if "STATE" in line).split()
    order = ["HOST", "STATE", "RATE", "WAIT", "STEP", "BUSY", "QUEUED", "ROLE"]
    kept = [title for title in order if title in titles]
    assert kept == order[: len(kept)]


def test_states_have_words_and_signs():
    """Nobody needs to tell red from green."""
    states = {
        "training": "+",
        snapshot.STARTING: "~",
        snapshot.SILENT: "!",
        snapshot.NO_ANSWER: "!",
        snapshot.FAILED: "x",
        snapshot.SUCCEEDED: "=",
        snapshot.ELSEWHERE: "?",
    }
    lines = text_of(job(*(trainer(number, state) for number, state in enumerate(states))))
    for state, sign in states.items():
        assert any(f"{sign} {state}" in line for line in lines)


def test_a_low_terminal_shows_hosts_with_problems_first():
    """How many others there are is said."""
    rows = [trainer(number) for number in range(40)]
    rows[33] = trainer(33, snapshot.SILENT, note="rank 33 training for 75 s")
    lines = text_of(job(*rows), height=20)
    assert len(lines) <= 20
    assert [line.split()[0] for line in lines if "algo-" in line][:2] == ["algo-33", "algo-0"]
    assert "! algo-33: rank 33 training for 75 s" in lines
    hidden = next(line for line in lines if line.startswith("and "))
    assert int(hidden.split()[1]) == 40 - sum("ml.g5.xlarge" in line for line in lines)


def test_a_job_that_has_just_started():
    """Nothing is known yet, and nothing is made up."""
    shown = Snapshot(1e9, "digits", seconds=9.0, hosts=[HostRow("algo-1", "g", "trainer")])
    assert text_of(shown) == [
        "job digits, running for 9 s",
        "no training step yet",
        "HOST    ROLE     STATE       ",
        "algo-1  trainer  ~ starting  ",
    ]


def test_colour_is_not_needed(monkeypatch):
    """With NO_COLOR the same words are there, and no colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    lines = text_of(job(trainer(1)), force_terminal=True, color_system="truecolor")
    assert any("+ training" in line for line in lines)
    assert not any("\x1b[3" in line for line in lines)


def test_nothing_that_a_host_says_reaches_the_terminal_as_a_command():
    """Names of metrics and events hold text of other programs, which may set the clipboard or move the cursor."""
    evil = "\x1b]52;c;cGF5bG9hZA==\x07\x9b2J"
    shown = job(
        trainer(1, state=f"training{evil}", instance_type=f"ml.g5{evil}"),
        metrics={f"loss{evil}": 0.5},
        events=[EventRow(1e9, "algo-1", f"failure{evil}", f"oh{evil}")],
        others=[f"other{evil}"],
    )
    text = "\n".join(text_of(shown, width=300))
    assert "loss 0.5" in text
    assert not set("\x1b\x07\x9b") & set(text)
    assert "52;c" not in text
