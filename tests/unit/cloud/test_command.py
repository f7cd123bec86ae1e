"""The command ``lightning-sm jobs``."""

import sys

import pytest

from lightning_sm._untested import SERVICE
from lightning_sm.cloud import command
from lightning_sm.errors import AWSError
from lightning_sm.report.command import write_report
from lightning_sm.submit.again import again
from tests.fakes.aws import NOW, event, one_host, training_job
from tests.unit.cloud.test_find import ARN, tuning_job


@pytest.fixture
def run(clients, capsys):
    """Return a function that runs the command and returns its exit code and output."""

    def run(*argv):
        code = command.main(argv, clients, write_report=write_report, again=again)
        return code, capsys.readouterr().out

    return run


def describes(clients, *jobs):
    """Prepare the descriptions of training jobs."""
    for job in jobs:
        clients.answers("sagemaker", "describe_training_job", job, TrainingJobName=job["TrainingJobName"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["log", "job-1"], "Did you mean logs?"),
        (["sotp", "job-1"], "Did you mean stop?"),
        (["frobnicate"], "The commands are list, logs, stop, report, again."),
    ],
)
def test_an_unknown_command_is_answered_with_ours(run, argv, words):
    """An unknown command raises an error that suggests a similar command, or else lists all commands."""
    with pytest.raises(AWSError, match="has no command") as caught:
        run(*argv)
    assert words in str(caught.value)


def test_the_list_shows_the_newest_jobs(run, clients):
    """The list has the requested number of jobs and takes one request."""
    summaries = [
        {"TrainingJobName": name, "TrainingJobArn": ARN + name, "CreationTime": NOW, "TrainingJobStatus": "Completed"}
        for name in ("a", "b", "c")
    ]
    clients.answers(
        "sagemaker",
        "list_training_jobs",
        {"TrainingJobSummaries": summaries},
        SortBy="CreationTime",
        SortOrder="Descending",
        NameContains="digits",
    )
    code, text = run("list", "digits", "--limit", "2")
    assert code == 0
    rows = [" ".join(line.split()) for line in text.splitlines()[2:]]
    assert rows == ["a Completed 2026-11-22 12:00 UTC", "b Completed 2026-11-22 12:00 UTC"]


def test_logs_of_a_completed_job_are_in_the_order_of_time(run, clients):
    """Each line has its time and its host."""
    describes(clients, training_job(ResourceConfig=one_host()))
    clients.answers("logs", "filter_log_events", {"events": [event(number, "algo-1", "a") for number in (2, 0, 1)]})
    expected = "".join(f"1970-01-01 00:00:0{number} algo-1 | a\n" for number in range(3))
    assert run("logs", "job-1") == (0, expected)


def test_logs_of_a_failed_job_begin_with_the_reason(run, clients):
    """The exit code is the job's; --all prints the whole log in the order of time instead."""
    job = training_job(status="Failed", FailureReason="AlgorithmError: nan, exit code: 4", ResourceConfig=one_host())
    describes(clients, job)
    clients.answers("logs", "describe_log_streams", {"logStreams": []})
    code, text = run("logs", "job-1")
    assert code == 4
    assert text.startswith("failed: AlgorithmError: nan, exit code: 4\n")
    describes(clients, job)
    clients.answers("logs", "filter_log_events", {"events": [event(1, "algo-1", "a")]})
    assert run("logs", "job-1", "--all") == (4, "1970-01-01 00:00:01 algo-1 | a\n")


def test_logs_of_a_job_that_waits_say_so(run, clients):
    """A job whose hosts have not started has no log."""
    describes(clients, training_job(status="InProgress", SecondaryStatus="Pending", ResourceConfig=one_host()))
    clients.refuses("logs", "filter_log_events", "ResourceNotFoundException")
    assert run("logs", "job-1") == (0, "job-1 is Pending and has no log yet.\n")


def test_a_running_job_is_asked_to_stop(run, clients):
    """The output states how long stopping takes."""
    describes(clients, training_job(status="InProgress"))
    clients.answers("sagemaker", "stop_training_job", {}, TrainingJobName="job-1")
    code, text = run("stop", "job-1")
    assert code == 0
    assert "120 s" in text


def test_stopping_a_finished_job_says_that_it_has_ended(run, clients):
    """For a job that has ended, no request to stop is sent, since the service would refuse it."""
    describes(clients, training_job())
    assert run("stop", "job-1") == (0, "job-1 has ended: Completed.\n")


def test_tuning_jobs_are_stopped_by_their_own_api(run, clients):
    """A tuning job is stopped as a whole; stopping one training job would only start the next."""
    clients.refuses("sagemaker", "describe_training_job", "ValidationException")
    clients.answers("sagemaker", "describe_hyper_parameter_tuning_job", tuning_job())
    clients.answers("sagemaker", "stop_hyper_parameter_tuning_job", {}, HyperParameterTuningJobName="tune-1")
    assert "tune-1" in run("stop", "tune-1")[1]


def test_a_refusal_of_aws_is_one_line(run, clients):
    """A refusal by AWS, such as for expired credentials, becomes an error in one line."""
    clients.refuses("sagemaker", "describe_training_job", "ExpiredTokenException", "The token has expired")
    with pytest.raises(AWSError, match=r"AWS rejected the request or cannot be reached: .*The token has expired"):
        run("stop", "job-1")


@pytest.mark.parametrize("variables", [{}, {"AWS_DEFAULT_REGION": "us-east-1"}])
def test_what_is_missing_on_this_machine_is_said(monkeypatch, variables):
    """A missing region and missing credentials raise different errors."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    files = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    for name, value in {**files, "AWS_EC2_METADATA_DISABLED": "true", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AWSError, match="No AWS credentials" if variables else "No AWS region"):
        command.main(["list"], write_report=write_report, again=again)


def test_help_says_what_has_never_run(capsys):
    """The help states what has not been tested on the service, so that users read it before they use it."""
    with pytest.raises(SystemExit):
        command.main(["--help"], write_report=write_report, again=again)
    assert SERVICE in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_a_log_do_not_act_upon_a_terminal(run, clients, monkeypatch, is_terminal):
    """Control sequences from other programs are removed on a terminal, while files and pipes keep them."""
    evil = "a \x1b]52;c;cGF5bG9hZA==\x07\x1b[31mred\x9b2J"
    describes(clients, training_job(ResourceConfig=one_host()))
    clients.answers("logs", "filter_log_events", {"events": [event(1, "algo-1", evil)]})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert run("logs", "job-1") == (0, f"1970-01-01 00:00:01 algo-1 | {'a red' if is_terminal else evil}\n")
