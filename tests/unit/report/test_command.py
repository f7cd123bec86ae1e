"""The commands ``report``, ``compare`` and ``plan``, as run from a shell."""

import json
import logging
import re
import signal
import subprocess
import sys

import pytest

from lightning_sm.__main__ import main
from tests.unit.report.recorded import head, input_bound, steps, write

PRICES = ("--price", "ml.g5.xlarge=1.41", "--price", "ml.c5.xlarge=0.2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write a run with too few workers."""
    return str(input_bound(tmp_path_factory.mktemp("record") / "run"))


def test_report_writes_a_page_and_says_the_verdict(run, tmp_path, caplog, capsys):
    """The page atomically replaces an older one, all users can read it, and stdout has verdict and changes."""
    file = tmp_path / "new" / "page.html"
    file.parent.mkdir()
    file.write_text("old")
    with caplog.at_level(logging.INFO):
        assert main(["report", run, "-o", str(file), *PRICES]) == 0
    assert file.read_text().startswith("<!doctype html>")
    assert "$0.032" in file.read_text()
    assert [path.name for path in file.parent.iterdir()] == ["page.html"]
    assert file.stat().st_mode & 0o444 == 0o444
    said, *changes = capsys.readouterr().out.splitlines()
    assert said.startswith("job: Succeeded after 72 s. Limited by waiting for data (transforms), 48% of the job (34.8")
    assert changes[0].startswith("- Waiting for data (transforms), 48% of the job (34.8 s), $0.016: ")
    assert f"report: {file}" in caplog.text


def test_hosts_without_a_price_are_named(run, tmp_path, caplog):
    """If a price is missing, the page and the log name the host's type instead of a cost."""
    file = tmp_path / "page.html"
    assert main(["report", run, "-o", str(file), "--price", "ml.g5.xlarge=1.41", "--price", "ml.c5.xlrge=0.2"]) == 0
    said = "No price for ml.c5.xlarge. Known prices (--price): ml.c5.xlrge, ml.g5.xlarge."
    assert f"job: {said}" in caplog.text
    assert said in file.read_text()
    assert "Cost: " not in file.read_text()


def test_runs_get_the_names_that_the_user_gives(tmp_path, capsys, caplog):
    """Names are assigned in the order of the folders, whichever run began first; too many names raise an error."""
    folders = [str(input_bound(tmp_path / name, begin=begin)) for name, begin in (("new", 100.0), ("old", 0.0))]
    for path in (tmp_path / "old").rglob("*.jsonl"):
        path.write_text(path.read_text().replace('"job":"job"', '"job":"other"'))
    page = ["-o", str(tmp_path / "page.html")]
    assert main(["report", *folders, *page, "--name", "with a data host", "--name", "before"]) == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line[0] != "-"]
    assert names == ["before", "with a data host"]
    assert "<h1>with a data host</h1>" in (tmp_path / "page.html").read_text()
    assert main(["report", folders[0], *page, "--name", "a", "--name", "b"]) == 2
    assert "--name is given 2 times, for only 1 folder." in caplog.text


def test_a_timeline_is_written_beside_the_page(run, tmp_path, caplog):
    """The timeline is written even if the page cannot be written."""
    (tmp_path / "page.html").mkdir()
    assert main(["report", run, "-o", str(tmp_path / "page.html"), "--trace", str(tmp_path / "run.json")]) == 2
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def test_one_file_cannot_be_page_and_timeline(run, tmp_path, caplog):
    """The page would replace the timeline."""
    assert main(["report", run, "-o", str(tmp_path / "both"), "--trace", str(tmp_path / "both")]) == 2
    assert "--output and --trace are the same file" in caplog.text


def test_a_page_that_cannot_be_written_is_an_error_in_one_line(run, tmp_path, caplog):
    """A page that cannot be written causes an error in one line and leaves no partial file."""
    (tmp_path / "page.html").mkdir()
    assert main(["report", run, "-o", str(tmp_path / "page.html")]) == 2
    assert "cannot be written: Is a directory" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_compare_says_times_and_costs(run, capsys):
    """The comparison is printed as a table or as JSON."""
    assert main(["compare", run, run, *PRICES]) == 0
    said = "B takes 72 s instead of 72 s for the same work (as fast), and costs $0.032 instead of $0.032 (the same)."
    assert capsys.readouterr().out.startswith(said)
    assert main(["compare", run, run, *PRICES, "--steps", "2400", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["b"]["time_to_train_s"] == pytest.approx(11 + 2 + 120)


def test_a_folder_of_several_jobs_is_not_compared(tmp_path, caplog, capsys):
    """A folder with several jobs raises an error that names them, unless one is named for each side."""
    for name, samples in (("first", 10), ("second", 20)):
        write(tmp_path, head(1, job=name), *(steps(11 + second, step=samples * second) for second in range(5)))
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "2 jobs: first, second. Name one with --job." in caplog.text
    assert main(["compare", str(tmp_path), str(tmp_path), "--job", "first", "second"]) == 0
    assert re.search(r"^run +first +second", capsys.readouterr().out, re.MULTILINE)


def test_a_reader_that_leaves_early_is_no_error(run):
    """When ``head`` has read enough, the command ends without a traceback."""
    command = [sys.executable, "-m", "lightning_sm", "report", "--json", "--once", run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_plan_says_how_many_workers(run, capsys):
    """The plan covers the measured kind of host and another kind."""
    assert main(["plan", run]) == 0
    assert capsys.readouterr().out.startswith("Training waits 58% of the time for data. Use 2 data hosts instead")
    assert main(["plan", run, "--kind", "ml.c5.4xlarge"]) == 0
    assert re.search(r"^15 \(best\) +1 ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", [["report"], ["plan"], ["compare", "other"]])
def test_a_folder_without_a_record_is_an_error(command, tmp_path, caplog):
    """A folder without a record causes an error in one line."""
    assert main([*command, str(tmp_path)]) == 2
    assert caplog.text.count("error: ") == 1


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", "1.5"]])
def test_wrong_numbers_are_refused(run, words, capsys):
    """An invalid number of steps causes an error that shows it."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", run, *words])
    assert ended.value.code == 2
    assert f"got '{words[1]}'" in capsys.readouterr().err
