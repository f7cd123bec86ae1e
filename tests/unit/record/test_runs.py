"""Finding the record of a run wherever its files are."""

import io
import re
import shutil
import tarfile

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import FOLDER, End, Span, Steps
from lightning_sm.record.runs import read_run, read_runs
from lightning_sm.report import verdict
from lightning_sm.report.figures import Figures
from tests.unit.report.recorded import BEGIN, head, input_bound, steps, use, write


def names(run):
    """Return attempt, host and process of each record."""
    return [(record.attempt, record.head.host, record.head.who) for record in run.records]


ALL = [(1, "algo-1", "launcher"), (1, "algo-1", "rank-0"), (1, "algo-2", "launcher")]


def test_a_folder_and_an_archive_of_it_are_the_same_run(tmp_path):
    """An output.tar.gz can be read without unpacking it."""
    folder = input_bound(tmp_path / "run")
    archive = tmp_path / "output.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "algo-1")
        tar.addfile(tarfile.TarInfo("../../evil.jsonl"), io.BytesIO())
    assert names(read_run(folder)) == names(read_run(archive)) == ALL
    assert read_run(archive).records == read_run(folder).records
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.tar.gz", "run"]


def test_hosts_whose_folders_are_apart_are_one_run(tmp_path):
    """Hosts of a job without checkpoints have separate folders, which form one run."""
    folder = input_bound(tmp_path / "run")
    for host in ("algo-1", "algo-2"):
        (tmp_path / host / "1").mkdir(parents=True)
        for file in folder.glob(f"*/1/{host}-*"):
            shutil.move(file, tmp_path / host / "1")
    (run,) = read_runs([tmp_path / "algo-1", tmp_path / "algo-2"])
    assert names(run) == ALL


def test_of_two_copies_the_longer_one_counts(tmp_path):
    """Of two copies of a file, such as on the host and in an incomplete upload, the longer one is used."""
    input_bound(tmp_path / "a")
    write(tmp_path / "b", head(1), steps(11))
    (run,) = read_runs([tmp_path / "a", tmp_path / "b"])
    assert names(run) == ALL
    assert sum(isinstance(line, Steps) for record in run.records for line in record.lines) == 60


def test_attempts_that_do_not_know_of_each_other_are_told_apart(tmp_path):
    """Without a checkpoint folder, each attempt calls itself the first one, and their times tell them apart."""
    input_bound(tmp_path / "attempt-1", outcome="interrupted")
    input_bound(tmp_path / "attempt-2", begin=100.0)
    run = Figures(read_run(tmp_path))
    assert [attempt.number for attempt in run.attempts] == [1, 2]
    assert [attempt.outcome for attempt in run.attempts] == ["interrupted", "succeeded"]


def test_a_restarted_process_goes_on_with_its_file(tmp_path):
    """A restarted process appends to the file of the same attempt, with another head."""
    write(tmp_path, head(1), steps(11), head(20), steps(31))
    assert [(record.attempt, record.head.t - 1_700_000_000) for record in read_run(tmp_path).records] == [
        (1, 1),
        (1, 20),
    ]


def test_jobs_that_share_a_folder_are_several_runs(tmp_path):
    """A job that resumes another job's checkpoints writes into the same folder."""
    write(tmp_path, head(1, job="first"), steps(11))
    write(tmp_path, head(100, job="second"), steps(111), attempt=2)
    assert [run.name for run in read_runs([tmp_path])] == ["first", "second"]
    assert read_run(tmp_path, "second").name == "second"
    with pytest.raises(JobConfigError, match=r"2 jobs: first, second\. Name one with --job"):
        read_run(tmp_path)
    with pytest.raises(JobConfigError, match=r"no record of the job third .*first, second"):
        read_run(tmp_path, "third")


def test_a_job_without_a_name_is_called_after_its_folder(tmp_path):
    """A job without a name, as from some local modes, is named after its folder."""
    write(tmp_path / "run", head(1, job=None), steps(11))
    assert read_run(tmp_path / "run").name == "run"


@pytest.mark.parametrize("content", [None, b"", b"not an archive"])
def test_what_is_no_record_is_named(tmp_path, content):
    """A folder without records, a missing file and a file of another kind raise errors that name the path."""
    source = tmp_path / "run"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(JobConfigError, match=str(source)):
        read_run(source)
    with pytest.raises(JobConfigError, match="has no record of a run: no files lightning-sm-record"):
        read_run(tmp_path)
    write(tmp_path, head(1))
    with pytest.raises(
        JobConfigError, match="no record of a run: no lines after the header in the files lightning-sm-record"
    ):
        read_run(tmp_path)


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    """Damaged lines are skipped and counted, including valid JSON with impossible values such as a negative time."""
    path = input_bound(tmp_path) / FOLDER / "1" / "algo-1-rank-0.jsonl"
    before = read_run(tmp_path)
    with path.open("ab") as file:
        file.write(b'\n{"kind":"steps","t":-3.0,"step":1,"n":1}\n{"kind":"steps","t"')
    after = read_run(tmp_path)
    assert before.flaws == ""
    assert after.flaws == "Skipped 2 lines of the record: damaged, or from another version."
    assert [record.lines for record in after.records] == [record.lines for record in before.records]
    assert verdict.ending(Figures(after)).endswith(after.flaws)


def test_a_file_whose_first_line_is_damaged_is_named(tmp_path, caplog):
    """Without its first line, a file does not say which process wrote it."""
    input_bound(tmp_path)
    path = write(tmp_path, steps(11), steps(12), who="rank-1")
    assert len(read_run(tmp_path).records) == 3
    assert f"{path}: its 2 lines cannot be read, because the first one is damaged." in caplog.text


def test_a_missing_attempt_is_said(tmp_path):
    """A folder with only the second attempt says that the first one is missing."""
    assert read_run(input_bound(tmp_path, attempt=2)).flaws == "No record of attempt 1."


def test_clocks_that_differ_are_said(tmp_path):
    """Hosts of an attempt run at the same time, so a host that begins long after the others' end has another clock."""
    write(tmp_path, head(1), steps(11), steps(12))
    write(tmp_path, head(86400, "algo-2", "launcher"), use(86410), host="algo-2", who="launcher")
    said = read_run(tmp_path).flaws
    assert said.startswith("In attempt 1, algo-2 began 24 h after the end of algo-1: clocks differ, so")


def test_attempts_that_overlap_are_said(tmp_path):
    """An attempt begins after the end of the previous one, so if it seems to begin before, its hosts' clocks differ."""
    input_bound(tmp_path)
    input_bound(tmp_path, attempt=2, begin=-7200.0)
    assert read_run(tmp_path).flaws.startswith("Attempt 2 began 2 h 1 min before the end of the previous one:")


@pytest.mark.parametrize(("t", "jump"), [(-7200, "2 h"), (7200, "2 h")])
def test_a_jump_of_the_clock_is_said(tmp_path, t, jump):
    """A clock that goes back, or ahead by more than any recorded duration, is reported."""
    write(tmp_path, head(1), steps(11), steps(11 + t), steps(12 + t))
    said = read_run(tmp_path).flaws
    assert re.fullmatch(rf"The clock of algo-1 jumped by {jump}.*: durations and costs may be off by as much\.", said)


def test_a_long_silence_of_which_a_line_tells_is_no_jump(tmp_path):
    """Hours in a step or a validation, or after the training, are not mistaken for a clock jump."""
    hours = Span(BEGIN + 9000, "validation", BEGIN + 13, 8987.0)
    write(tmp_path, head(1), steps(12), hours, End(BEGIN + 9001, "succeeded", 0), use(20_000))
    assert read_run(tmp_path).flaws == ""
