"""The command lightning-sm jobs."""

import io
import sys
import tarfile

import pytest
from botocore.response import StreamingBody

from lightning_sm._untested import SERVICE
from lightning_sm.cloud import command
from lightning_sm.errors import AWSError, JobConfigError
from lightning_sm.report.command import report_writer
from lightning_sm.submit.again import again
from tests.fakes.aws import NOW, event, one_host, training_job
from tests.unit.cloud.test_find import ARN, tuning_job


@pytest.fixture
def run(clients, capsys, monkeypatch):
    """Runs the command, and returns its exit code and what it wrote."""
    monkeypatch.setattr(command, "_now", lambda: NOW)

    def run(*argv):
        code = command.main(argv, clients, new_report_writer=report_writer, again=again)
        return code, capsys.readouterr().out

    return run


def describes(clients, *jobs):
    """Prepare the descriptions of training jobs."""
    for job in jobs:
        clients.answers("sagemaker", "describe_training_job", job, TrainingJobName=job["TrainingJobName"])


def objects(clients, **files):
    """Prepare the list of the files of job-1, and the content of one."""
    keys = [{"Key": f"out/job-1/output/{name}"} for name in files["names"]]
    clients.answers("s3", "list_objects_v2", {"Contents": keys}, Bucket="bucket", Prefix="out/job-1/output/")


def content(clients, key, data):
    """Prepare the content of a file."""
    body = StreamingBody(io.BytesIO(data), len(data))
    clients.answers("s3", "get_object", {"Body": body}, Bucket="bucket", Key=f"out/job-1/output/{key}")


def archive(**files):
    """A compressed archive; dots and slashes in names are written as _ and __."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_", "."))
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_debug_allows_a_shell(clients, run):
    """On the hosts of the job with this name."""
    describes(clients, training_job(status="InProgress"))
    expected = {"TrainingJobName": "job-1", "RemoteDebugConfig": {"EnableRemoteDebug": False}}
    clients.answers("sagemaker", "update_training_job", {"TrainingJobArn": f"{ARN}job-1"}, **expected)
    assert run("debug", "job-1", "--off") == (0, "Remote debugging of job-1 is off.\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["cancel", "job-1"], "Did you mean 'lightning-sm jobs stop'?"),
        (["log", "job-1"], "Did you mean 'lightning-sm jobs logs'?"),
        (["sotp", "job-1"], "Did you mean 'lightning-sm jobs stop'?"),
        (["frobnicate"], "There are list, logs, stop, cost, files, report, again, debug, shell."),
    ],
)
def test_an_unknown_command_is_answered_with_ours(run, argv, words):
    """Other tools call them by other names."""
    with pytest.raises(AWSError, match="has no command") as caught:
        run(*argv)
    assert words in str(caught.value)


def test_the_list_shows_hosts_and_times(run, clients):
    """One request finds the newest jobs, one for each shown row its hosts; others are not asked for."""
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
        StatusEquals="InProgress",
        MaxResults=2,
    )
    running = training_job("a", "InProgress", EnableManagedSpotTraining=True)
    describes(clients, running, training_job("b", ResourceConfig=one_host(), TrainingStartTime=None))
    code, text = run("list", "digits", "--status", "InProgress", "--limit", "2")
    assert code == 0
    rows = [" ".join(line.split()) for line in text.splitlines()[2:]]
    assert rows == [
        "a Training, spot 2026-11-22 10:00 1:00:00 2 ml.g5.xlarge + 1 ml.c5.xlarge",
        "b Completed 2026-11-22 10:00 1 ml.g5.xlarge",
    ]


def test_logs_of_a_completed_job_are_in_the_order_of_time(run, clients):
    """With --tail only the last ones."""
    job = training_job(ResourceConfig=one_host())
    lines = [event(number, "algo-1", str(number)) for number in range(5)]
    for argv, expected in ([], range(5)), (["--tail", "2"], (3, 4)):
        describes(clients, job)
        clients.answers("logs", "filter_log_events", {"events": lines})
        assert run("logs", "job-1", *argv) == (
            0,
            "".join(f"1970-01-01 00:00:0{number} algo-1 | {number}\n" for number in expected),
        )


def test_logs_of_a_failed_job_begin_with_the_reason(run, clients):
    """The exit code is that of the job; --all shows everything in the order of time instead."""
    job = training_job(status="Failed", FailureReason="AlgorithmError: nan, exit code: 4", ResourceConfig=one_host())
    describes(clients, job)
    clients.answers("logs", "describe_log_streams", {"logStreams": []})
    code, text = run("logs", "job-1")
    assert code == 4
    assert text.startswith("failed: AlgorithmError: nan, exit code: 4\n")
    describes(clients, job)
    clients.answers("logs", "filter_log_events", {"events": [event(1, "algo-1", "a")]})
    assert run("logs", "job-1", "--all") == (4, "1970-01-01 00:00:01 algo-1 | a\n")


def test_logs_of_one_host(run, clients):
    """An unknown one is answered with those that have a log."""
    job = training_job(ResourceConfig=one_host())
    for host in ("algo-1", "algo-3"):
        describes(clients, job)
        clients.answers("logs", "describe_log_streams", {"logStreams": [{"logStreamName": "job-1/algo-1-5"}]})
        if host == "algo-1":
            clients.answers("logs", "filter_log_events", {"events": [event(1, "algo-1", "a")]})
            assert run("logs", "job-1", "--host", host) == (0, "1970-01-01 00:00:01 algo-1 | a\n")
        else:
            with pytest.raises(AWSError, match=r"no log of the host algo-3; hosts with a log: algo-1\."):
                run("logs", "job-1", "--host", host)


def test_logs_of_a_job_that_waits_say_so(run, clients):
    """Before its hosts have started, there is no log."""
    describes(clients, training_job(status="InProgress", SecondaryStatus="Pending", ResourceConfig=one_host()))
    clients.refuses("logs", "filter_log_events", "ResourceNotFoundException")
    assert run("logs", "job-1") == (0, "job-1 is Pending and has no log yet.\n")


def test_a_running_job_is_asked_to_stop(run, clients):
    """The answer says how long that takes."""
    describes(clients, training_job(status="InProgress"))
    clients.answers("sagemaker", "stop_training_job", {}, TrainingJobName="job-1")
    code, text = run("stop", "job-1")
    assert code == 0
    assert "120 s" in text


@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_stopping_a_finished_job_says_that_it_has_ended(run, clients, ends_meanwhile):
    """Also if it ends between the question and the request, which the service then refuses."""
    if ends_meanwhile:
        describes(clients, training_job(status="InProgress"))
        clients.refuses("sagemaker", "stop_training_job", "ValidationException")
    describes(clients, training_job())
    assert run("stop", "job-1") == (0, "job-1 has ended: Completed.\n")


def test_tuning_jobs_are_stopped_by_their_own_api(run, clients):
    """Stopping one of its training jobs would only make it start the next one."""
    clients.refuses("sagemaker", "describe_training_job", "ValidationException")
    clients.answers("sagemaker", "describe_hyper_parameter_tuning_job", tuning_job())
    clients.answers("sagemaker", "stop_hyper_parameter_tuning_job", {}, HyperParameterTuningJobName="tune-1")
    assert "tune-1" in run("stop", "tune-1")[1]


def test_cost_takes_prices_from_a_file_and_from_options(run, clients, tmp_path):
    """An option overrides the file."""
    (tmp_path / "prices.yaml").write_text("per_hour: {ml.g5.xlarge: 1, ml.c5.xlarge: 1}\n")
    describes(clients, training_job(BillableTimeInSeconds=3600, TrainingTimeInSeconds=3600))
    _, text = run("cost", "job-1", "--prices", str(tmp_path / "prices.yaml"), "--price", "data=0.5")
    assert "total: $2.50\n" in text
    describes(clients, training_job())
    with pytest.raises(JobConfigError, match="No price is known for"):
        run("cost", "job-1")


def test_files_are_listed_with_their_addresses(run, clients):
    """Also before they are there, which is said."""
    left = {
        "CheckpointConfig": {"S3Uri": "s3://bucket/checkpoints"},
        "TensorBoardOutputConfig": {"S3OutputPath": "s3://bucket/tensorboard"},
    }
    describes(clients, training_job(**left))
    assert [line.split() for line in run("files", "job-1")[1].splitlines()] == [
        ["model", "s3://bucket/out/job-1/output/model.tar.gz"],
        ["output", "s3://bucket/out/job-1/output/output.tar.gz"],
        ["checkpoints", "s3://bucket/checkpoints"],
        ["TensorBoard", "s3://bucket/tensorboard"],
    ]
    describes(clients, training_job(status="InProgress"))
    assert "The job is InProgress: it uploads model and output when it ends." in run("files", "job-1")[1]


def test_one_file_is_picked_out_of_the_archive(run, clients, tmp_path, monkeypatch):
    """Which is not written to the disk; the file is complete or not there, and never overwritten."""
    monkeypatch.chdir(tmp_path)
    data = archive(algo1__report_html="<html>", algo1__other_txt="x")
    describes(clients, training_job())
    objects(clients, names=["model.tar.gz", "output.tar.gz"])
    content(clients, "output.tar.gz", data)
    assert run("files", "job-1", "report.html") == (0, "output.tar.gz: algo1/report.html -> report.html\n")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "<html>"
    describes(clients, training_job())
    with pytest.raises(AWSError, match=r"report\.html exists"):
        run("files", "job-1", "report.html")


def test_a_name_of_several_files_needs_its_folder(run, clients, tmp_path):
    """The message lists them; the whole path names one."""
    data = archive(algo1__report_html="1", algo2__report_html="2", report_html="3")
    target = tmp_path / "here.html"
    for name, expected in {"report.html": "3", "algo2/report.html": "2"}.items():
        describes(clients, training_job())
        objects(clients, names=["output.tar.gz"])
        content(clients, "output.tar.gz", data)
        run("files", "job-1", name, "--to", str(target))
        assert target.read_text() == expected
        target.unlink()
    describes(clients, training_job())
    objects(clients, names=["output.tar.gz"])
    content(clients, "output.tar.gz", archive(a__x_txt="1", b__x_txt="2"))
    with pytest.raises(AWSError, match=r"2 files; name one with its folder: a/x\.txt, b/x\.txt"):
        run("files", "job-1", "x.txt", "--to", str(target))
    assert list(tmp_path.iterdir()) == []


def test_output_without_compression_is_read_file_by_file(run, clients, tmp_path):
    """As CompressionType NONE leaves it."""
    describes(clients, training_job(OutputDataConfig={"S3OutputPath": "s3://bucket/out", "CompressionType": "NONE"}))
    objects(clients, names=["data/algo-1/report.html", "model/model.ckpt"])
    content(clients, "data/algo-1/report.html", b"<html>")
    target = tmp_path / "r.html"
    assert run("files", "job-1", "report.html", "--to", str(target))[0] == 0
    assert target.read_bytes() == b"<html>"


def test_a_missing_file_is_answered_with_what_is_there(run, clients, tmp_path):
    """Archives are searched before."""
    describes(clients, training_job())
    objects(clients, names=["output.tar.gz"])
    content(clients, "output.tar.gz", archive(a_txt="1"))
    with pytest.raises(
        AWSError, match=r"no file report\.html in s3://bucket/out/job-1/output/, which contains output\.tar\.gz"
    ):
        run("files", "job-1", "report.html", "--to", str(tmp_path / "x"))


def test_a_refusal_of_aws_is_one_line(run, clients):
    """Such as expired credentials."""
    clients.refuses("sagemaker", "describe_training_job", "ExpiredTokenException", "The token has expired")
    with pytest.raises(AWSError, match=r"AWS rejected the request or cannot be reached: .*The token has expired"):
        run("stop", "job-1")


@pytest.mark.parametrize("variables", [{}, {"AWS_DEFAULT_REGION": "us-east-1"}])
def test_what_is_missing_on_this_machine_is_said(monkeypatch, variables):
    """A region, or credentials."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    files = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    for name, value in {**files, "AWS_EC2_METADATA_DISABLED": "true", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AWSError, match="No AWS credentials" if variables else "No AWS region"):
        command.main(["list"], new_report_writer=report_writer, again=again)


def test_help_says_what_has_never_run(capsys):
    """Whoever is about to use the service reads it before, not in a page of the documentation."""
    with pytest.raises(SystemExit):
        command.main(["--help"], new_report_writer=report_writer, again=again)
    assert SERVICE in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_a_log_do_not_act_upon_a_terminal(run, clients, monkeypatch, is_terminal):
    """They are those of other programs; a file or a pipe gets them as they are."""
    evil = "a \x1b]52;c;cGF5bG9hZA==\x07\x1b[31mred\x9b2J"
    describes(clients, training_job(ResourceConfig=one_host()))
    clients.answers("logs", "filter_log_events", {"events": [event(1, "algo-1", evil)]})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert run("logs", "job-1") == (0, f"1970-01-01 00:00:01 algo-1 | {'a red' if is_terminal else evil}\n")
