"""The live view of a running job (``report --live``)."""

import json
import time

import pytest

from lightning_sm.__main__ import main
from lightning_sm.record.events import DataService, End, Event, GpuUse, HostUse, Loader, Metrics
from lightning_sm.record.runs import read_run
from lightning_sm.report import live as module
from lightning_sm.report.figures import Figures
from lightning_sm.report.live import as_text, live
from tests.unit.report.recorded import BEGIN, data, head, steps, use, write


def shown(folder):
    """Return the live view of the job in a folder."""
    return live(Figures(read_run(folder)))


@pytest.fixture
def job(tmp_path):
    """Write a job with a trainer, which has trained for 100 s, and a data host."""
    lines = [head(1), Loader(BEGIN + 6)]
    lines += [steps(10 + second, step=20 * second, step_s=0.05 if second > 80 else 0.1) for second in range(1, 101)]
    lines += [data(100, 1800), data(110, 2000), Metrics(BEGIN + 110, 2000, 1, {"loss": 0.25, "nan": None})]
    write(tmp_path, *lines)
    write(tmp_path, head(0, who="launcher"), use(100, 0.1), use(110, 0.5), who="launcher")
    write(tmp_path, head(0, "algo-2", "launcher"), use(110, 0.9), host="algo-2", who="launcher")
    return tmp_path


def test_rates_are_those_of_the_last_seconds(job):
    """Rates exclude the first 80 s of the job, in which steps took twice as long."""
    found = shown(job)
    assert (found.job, found.attempt, found.step, found.metrics["loss"]) == ("job", 1, 2000, 0.25)
    assert (found.steps_per_s, found.samples_per_s) == (pytest.approx(20.0), pytest.approx(640.0))
    trainer, served = found.hosts
    assert (trainer.state, trainer.step, trainer.num_built, trainer.cpu) == ("training", 2000, None, 0.5)
    assert (trainer.waiting, found.waiting) == (pytest.approx(0.58), pytest.approx(0.58))
    assert (served.state, served.step, served.num_built, served.cpu) == ("up", None, 2000, 0.9)


def test_people_get_a_few_facts_and_a_table(job):
    """Control sequences in events are removed, because events hold the text of other programs."""
    evil = "\x1b]52;c;cGF5bG9hZA==\x07"
    write(job, Event(BEGIN + 111, "failure", f"oh{evil}\nno"), who="launcher")
    text = as_text(shown(job))
    assert text.startswith(
        "job job, recorded for 111 s until 2023-11-14 22:15:11 UTC\n"
        "step 2,000   20 steps/s   640 samples/s   waiting for data 58% of the time\n"
        "loss 0.25\n"
    )
    words = [" ".join(line.split()) for line in text.splitlines()]
    assert "algo-1 trainer training 2,000 58% 50% 2 GB" in words
    assert "algo-2 data up 2,000 90% 2 GB" in words
    assert text.endswith("\n111 s algo-1 failure oh no")


def test_a_job_that_has_just_started(tmp_path):
    """Values of a job that has just started are None until they are measured."""
    write(tmp_path, head(1), Loader(BEGIN + 2))
    found = shown(tmp_path)
    assert [host.state for host in found.hosts] == ["starting", "no record here"]
    assert (found.step, found.steps_per_s, found.samples_per_s, found.waiting) == (None, None, None, None)
    assert "\nno training step so far\n" in as_text(found)


def test_only_the_newest_life_of_a_process_counts(job):
    """Rates start again with a restarted process or a new attempt; a launcher's end line determines the state."""
    write(job, head(200), Loader(BEGIN + 201), steps(220, step_s=0.5, step=30))
    assert shown(job).steps_per_s == pytest.approx(2.0)
    write(job, head(300), Loader(BEGIN + 301), attempt=2)
    assert (shown(job).attempt, shown(job).step) == (2, None)
    write(job, head(300, who="launcher"), End(BEGIN + 303, "failed", 1), who="launcher", attempt=2)
    assert shown(job).hosts[0].state == "failed"


def test_a_host_with_another_role_than_before_has_the_figures_of_its_own_role(job):
    """A trainer whose name belonged to a data host in an earlier attempt has built no batches."""
    roles = {"hosts": {"algo-2": "trainer"}, "group": "trainer", "role": "trainer", "world_size": 1}
    write(job, head(200, "algo-2", **roles), steps(211), host="algo-2", attempt=2)
    assert [(host.host, host.num_built) for host in shown(job).hosts] == [("algo-2", None)]


def test_a_data_host_that_was_lost_says_so(job):
    """The state of a data host comes from rank 0."""
    line = data(115, 2100)
    write(job, DataService(line.t, [dict(line.hosts[0], state="down")], line.ranks))
    served = shown(job).hosts[1]
    assert (served.state, served.num_built) == ("down", 2100)


def test_it_is_shown_until_the_job_ends(job, capsys, monkeypatch):
    """The view continues while the emulator moves the folders of an attempt, and after an interruption."""
    monkeypatch.setattr(module, "read_runs", lambda *_: looks.pop(0)())
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    run = [read_run(job)]
    write(job, End(BEGIN + 120, "interrupted", 143), who="launcher")
    write(job, End(BEGIN + 120, "succeeded", 0), host="algo-2", who="launcher")
    interrupted = [read_run(job)]
    write(job, head(200, who="launcher"), End(BEGIN + 220, "succeeded", 0), who="launcher")
    ended = [read_run(job)]

    def fail():
        raise module.JobConfigError("gone")

    looks = [lambda: run, fail, lambda: interrupted, lambda: ended]
    assert main(["report", "--live", "x", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["hosts"][0]["state"] for line in lines] == ["training", "interrupted", "succeeded"]


def test_a_job_that_ended_says_how(job, capsys):
    """For a job that has ended, the view shows the outcome, and that the values are from the last seconds."""
    write(job, End(BEGIN + 120, "failed", 1, "ValueError: x"), who="launcher")
    write(job, End(BEGIN + 120, "succeeded", 0), host="algo-2", who="launcher")
    assert main(["report", "--once", str(job)]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said == "Failed after 2 min: ValueError: x. The values below are from just before the end."


def test_a_killed_job_is_not_watched_forever(job, caplog, monkeypatch):
    """The view exits with code 3 once no host has written a line for a while."""
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    monkeypatch.setattr(module, "SILENCE_S", 0.05)
    assert main(["report", "--live", str(job)]) == 3
    assert "no host has written a line for" in caplog.text


def test_ctrl_c_ends_it(job, capsys, monkeypatch):
    """Ctrl-C exits without an error; --once prints the view once."""

    def press(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", press)
    assert main(["report", "--live", str(job)]) == 0
    assert main(["report", str(job), "--once"]) == 0
    assert capsys.readouterr().out.count("job job, recorded for") == 2
    assert main(["report", "--live", str(job / "none"), "--once"]) == 2


def test_hosts_with_gpus_show_their_use(job):
    """A host's GPU use is the mean over its GPUs."""
    gpus = [GpuUse(0.5, 1, 2), GpuUse(0.9, 1, 2)]
    write(job, HostUse(BEGIN + 112, 0.5, 1, 2, gpus=gpus), who="launcher")
    assert shown(job).hosts[0].gpu == pytest.approx(0.7)
