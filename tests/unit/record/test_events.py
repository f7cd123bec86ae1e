"""The record of a run survives a round trip through a file, torn lines and a full disk."""

import json
import logging
import math
from pathlib import Path

import pytest

from lightning_sm._structs import encode
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.variables import RECORD_DIR
from lightning_sm.record import events
from lightning_sm.record.events import Recorder

LINES = [
    events.FileHead(1.5, "algo-1", "rank-3", job="job", rank=3, world_size=4, hosts={"algo-1": "trainers"}),
    events.HostUse(2.0, 0.5, 10, 20, [events.GpuUse(0.75, 1, 2)]),
    events.Loader(2.0, workers=4, cpus=8, ranks_of_host=2),
    events.Steps(3.0, 40, 10, samples=320, parts=dict.fromkeys(events.PARTS, 1 / 6)),
    events.Span(4.0, "validation", 3.0, 1.0),
    events.Metrics(5.0, 40, 1, {"val_acc": 0.5}),
    events.DataService(6.0, [{"name": "algo-3", "workers": 4}], {"rank 0": {"wait_s": 1.0}}),
    events.Event(7.0, "restart", "restart 1 of 3"),
    events.End(8.0, "failed", 1, "because"),
]


def make_job(base: Path, **facts) -> SageMakerJob:
    """Return a job with one host."""
    groups = (InstanceGroup("trainers", ("algo-1",)),)
    return SageMakerJob("algo-1", ("algo-1",), groups, "test", base_dir=base, **facts)


def test_the_head_of_a_launcher_has_the_hyperparameters_without_secrets(tmp_path):
    """Only the launcher records the hyperparameters, with secrets hidden."""
    job = make_job(tmp_path, hyperparameters={"trainer.max_epochs": "3", "hub.token": "hf_abc"})
    head = events.head_of(job, events.LAUNCHER)
    assert head.hyperparameters["trainer.max_epochs"] == "3"
    assert "hf_abc" not in encode(head).decode()
    assert "hub.token" in head.hyperparameters
    assert events.head_of(job, "rank-0", rank=0).hyperparameters == {}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("train.py: error: argument --api_key/-k: invalid value: 'hunter2'", "train.py: error: argument (hidden)"),
        ("ValueError: password=hunter2 was refused", "ValueError: (hidden)"),
        ("ValueError: expected 7 tokens: got 8", "ValueError: expected 7 tokens: got 8"),
    ],
)
def test_a_reason_shows_no_secret_that_a_program_quotes(said, shown):
    """A secret that a program quotes is hidden, and the text before it is kept."""
    assert events.End(1.0, "failed", 1, said).reason == events.Event(1.0, "failure", said).text == shown


def test_every_line_comes_back(tmp_path):
    """Each kind of line is read back, to the microsecond."""
    path = tmp_path / "1" / "algo-1-rank-3.jsonl"
    recorder = Recorder(path)
    for line in LINES:
        recorder.append(line)
    recorder.close()
    read = events.read_lines(path.read_bytes())
    assert [type(line) for line in read] == [type(line) for line in LINES]
    assert read == LINES
    assert read[1] == LINES[1]
    assert {type(line) for line in LINES} == set(events.Line.__subclasses__())


def test_a_torn_line_is_left_out(tmp_path):
    """A line torn by a kill is skipped, and the next process appends to the same file."""
    path = tmp_path / "algo-1-rank-0.jsonl"
    Recorder(path).append(LINES[0])
    with path.open("a") as file:
        file.write('\n{"kind":"steps","t":3.0,"st')
    assert events.read_lines(path.read_bytes()) == LINES[:1]
    recorder = Recorder(path)
    recorder.append(LINES[4])
    assert events.read_lines(path.read_bytes()) == [LINES[0], LINES[4]]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "{}", '"span"', "{" * 9999, b"\xff"),
        *('{"kind":"unknown"}', '{"kind":"span"}', '{"kind":["span"]}'),
        '{"kind":"span","t":1.0,"name":"validation","begin":"yesterday","seconds":1.0}',
    ],
)
def test_what_is_no_line_is_nothing(text):
    """Content that is not a valid line is skipped without an error."""
    assert events.read_lines(text if isinstance(text, bytes) else text.encode()) == []


def test_a_newer_format_is_read_as_far_as_it_is_known():
    """Unknown fields of a newer format are ignored."""
    text = json.dumps({"kind": "event", "t": 1.0, "what": "hang", "new": 1})
    assert events.read_lines(text.encode()) == [events.Event(1.0, "hang")]


def test_what_json_does_not_have_becomes_null(tmp_path):
    """NaN and infinity become null, because JSON has neither."""
    text = encode(events.Metrics(1.0, 1, 0, {"loss": math.nan, "acc": math.inf}))
    assert json.loads(text, parse_constant=pytest.fail)["values"] == {"loss": None, "acc": None}


def test_any_text_stays_on_its_line(tmp_path):
    """Unicode line breaks stay within a line, and file names that are not Unicode are escaped."""
    recorder = Recorder(tmp_path / "algo-1-rank-0.jsonl")
    recorder.append(events.Event(1.0, "failure", "a\u2028b\nc"))
    recorder.append(events.Event(2.0, "failure", "\udcff"))
    recorder.close()
    texts = [line.text for line in events.read_lines(recorder.path.read_bytes())]
    assert texts == ["a\u2028b\nc", "\\udcff"]


def test_a_full_disk_is_said_once_and_raises_nothing(caplog):
    """A device that is always full causes one warning and no error."""
    recorder = Recorder(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        recorder.append(LINES[0])
        recorder.append(LINES[0])
    recorder.close()
    (said,) = caplog.messages
    assert "/dev/full" in said
    assert "No space left" in said


def test_a_folder_that_cannot_be_made_raises_nothing(tmp_path, caplog):
    """A folder that cannot be created, because a file is in its place, causes one warning and no error."""
    (tmp_path / "file").touch()
    Recorder(tmp_path / "file" / "1" / "algo-1-launcher.jsonl").append(LINES[0])
    assert len(caplog.messages) == 1


def test_the_record_lies_with_the_checkpoints(tmp_path):
    """The record is next to the checkpoints, which survive an attempt, or else in the output data of all hosts."""
    checkpoints = tmp_path / "checkpoints"
    assert events.record_folder(make_job(tmp_path, checkpoint_dir=checkpoints)) == checkpoints / events.FOLDER
    assert events.record_folder(make_job(tmp_path)) == tmp_path / "output" / "data" / events.FOLDER


def test_attempts_are_counted_by_own_files(tmp_path):
    """Only files of this host count as attempts, and all processes of a launcher share its attempt."""
    job = make_job(tmp_path)
    assert events.open_record(job, "rank-0", {}).path.parent.name == "1"
    events.open_record(job, "rank-0", {}).append(LINES[0])
    Recorder(events.record_folder(job) / "7" / "algo-2-rank-0.jsonl").append(LINES[0])
    assert events.open_record(job, "rank-0", {}).path.parent.name == "2"
    assert events.open_record(job, "rank-1", {}).path.parent.name == "1"
    env = {RECORD_DIR.name: str(tmp_path / "5")}
    assert events.open_record(job, "rank-0", env).path == tmp_path / "5" / "algo-1-rank-0.jsonl"


def test_files_are_found_below_a_folder(tmp_path):
    """Files and folders with other names are ignored."""
    names = ["10/algo-1-rank-0.jsonl", "2/algo-10-rank-12.jsonl", "2/algo-2-launcher.jsonl"]
    others = [
        "2/notes.jsonl",
        "x/algo-1-rank-0.jsonl",
        "0/algo-1-rank-0.jsonl",
        "2/algo-1-rank-0.jsonl.sagemaker-uploaded",
    ]
    for name in names + others:
        path = tmp_path / events.FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    expected = [tmp_path / events.FOLDER / name for name in names]
    assert events.find_files(tmp_path) == expected
    assert events.find_files(tmp_path / events.FOLDER / "2") == expected[1:]
    assert [events.file_attempt(path) for path in expected] == [10, 2, 2]


def test_series_get_fewer_lines_as_a_run_grows():
    """A day of steps takes a few thousand lines, at most 30 s apart."""
    now, gaps = 0.0, []
    while now < 86_400:
        gaps.append(events.gap_s(now, 1.0))
        now += gaps[-1]
    assert gaps[:600] == pytest.approx([1.0] * 600, abs=0.01)
    assert max(gaps) == pytest.approx(30.0)
    assert len(gaps) < 5_500
