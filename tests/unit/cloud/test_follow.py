"""Following jobs until they end."""

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from lightning_sm.cloud.follow import exit_code, follow, tuning_progress
from tests.fakes.aws import NOW, event, one_host, training_job
from tests.unit.cloud.test_find import tuning_job


def state(status, secondary=None, message="", **changed):
    """Return a description of job-1 with one host."""
    transitions = [{"Status": secondary or status, "StartTime": NOW, "StatusMessage": message}]
    return training_job(
        status=status,
        SecondaryStatus=secondary or status,
        SecondaryStatusTransitions=transitions,
        ResourceConfig=one_host(),
        **changed,
    )


def refuse(error):
    """Return a sleep function that raises the given exception."""

    def sleep(_):
        raise error

    return sleep


TRAINING = ("training", "job-1")


def test_every_change_of_state_is_one_line(clients, caplog):
    """An unchanged state is not logged again, and the log is read only on request."""
    states = [
        state("InProgress", "Starting"),
        state("InProgress", "Downloading", "images"),
        state("InProgress", "Downloading", "images"),
        state("Completed", message="done"),
    ]
    for one in states:
        clients.answers("sagemaker", "describe_training_job", one, TrainingJobName="job-1")
    pauses = []
    with caplog.at_level("INFO", "lightning_sm"):
        ended = follow(clients, *TRAINING, shows_log=False, sleep=pauses.append)
    assert ended["TrainingJobStatus"] == "Completed"
    assert caplog.messages == [
        "lightning-sm: Job job-1 is InProgress: Starting",
        "lightning-sm: Job job-1 is InProgress: Downloading images",
        "lightning-sm: Job job-1 is Completed: Completed done",
    ]
    assert pauses == [5.0] * 3


def test_a_log_that_may_not_be_read_does_not_end_the_wait(clients, caplog):
    """Users with permission to submit jobs may lack permission to read logs."""
    clients.answers("sagemaker", "describe_training_job", state("InProgress", "Training"))
    clients.refuses("logs", "filter_log_events", "AccessDeniedException")
    clients.answers("sagemaker", "describe_training_job", state("Completed"))
    ended = follow(clients, *TRAINING, shows_log=True, sleep=lambda _: None)
    assert exit_code(ended) == 0
    assert (
        caplog.text.count("Waiting without the job's log, which cannot be read: An error occurred (AccessDenied") == 1
    )


def test_the_log_is_written_as_it_comes_and_to_its_end(clients, capsys):
    """After the end of the job, the log is read until late lines have arrived."""
    for look in range(3):
        clients.answers("sagemaker", "describe_training_job", state("InProgress", "Training"))
        events = [event(look, "algo-1", f"line {look}")] if look != 1 else []
        clients.answers("logs", "filter_log_events", {"events": events})
    clients.answers("sagemaker", "describe_training_job", state("Completed"))
    for events in ([], [], [event(9, "algo-1", "late")]):
        clients.answers("logs", "filter_log_events", {"events": events})
    follow(clients, *TRAINING, shows_log=True, sleep=lambda _: None)
    assert capsys.readouterr().out.splitlines() == [
        "1970-01-01 00:00:00 algo-1 | line 0",
        "1970-01-01 00:00:02 algo-1 | line 2",
        "1970-01-01 00:00:09 algo-1 | late",
    ]


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        ClientError({"Error": {"Code": "ExpiredTokenException"}}, "DescribeTrainingJob"),
        EndpointConnectionError(endpoint_url="x"),
    ],
)
def test_who_stops_waiting_learns_how_to_stop_the_job(clients, caplog, error):
    """Ctrl-C, expired credentials and a lost network stop the wait but not the job, as a warning explains."""
    clients.answers("sagemaker", "describe_training_job", state("InProgress", "Training"))
    with caplog.at_level("WARNING", "lightning_sm"), pytest.raises(type(error)):
        follow(clients, *TRAINING, shows_log=False, sleep=refuse(error))
    for words in ("still be running", "lightning-sm jobs logs -f job-1", "lightning-sm jobs stop job-1"):
        assert words in caplog.text


def test_a_tuning_job_shows_its_counts_and_its_best_training_job(clients, caplog):
    """The log has the tuning job's counts and its best training job, since a tuning job has no log streams."""
    best = {
        "TrainingJobName": "tune-1-002",
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:111122223333:training-job/tune-1-002",
        "CreationTime": NOW,
        "TrainingJobStatus": "Completed",
        "TunedHyperParameters": {"model.learning_rate": "0.003", "data.batch_size": "64"},
        "FinalHyperParameterTuningJobObjectiveMetric": {"MetricName": "val_acc", "Value": 0.9712345},
    }
    ended = {**tuning_job(status="Completed"), "BestTrainingJob": best}
    ended["TrainingJobStatusCounters"] = {"Completed": 2, "Stopped": 1, "NonRetryableError": 1}
    for described in (tuning_job(), ended):
        clients.answers("sagemaker", "describe_hyper_parameter_tuning_job", described)
    with caplog.at_level("INFO", "lightning_sm"):
        assert exit_code(follow(clients, "tuning", "tune-1", shows_log=True, sleep=lambda _: None)) == 0
    assert caplog.messages == [
        "lightning-sm: Tuning job tune-1 is InProgress: 1 completed, 1 running",
        "lightning-sm: Tuning job tune-1 is Completed: 2 completed, 1 stopped early, 1 failed; "
        "best val_acc=0.971235 by tune-1-002 with data.batch_size=64 model.learning_rate=0.003",
    ]
    assert tuning_progress({"TrainingJobStatusCounters": {}}) == "no training job yet"


@pytest.mark.parametrize(
    ("description", "code"),
    [
        ({"TrainingJobStatus": "Completed"}, 0),
        ({"TrainingJobStatus": "Stopped"}, 1),
        ({"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: killed, exit code: 137"}, 137),
        ({"TrainingJobStatus": "Failed", "FailureReason": "ExecuteUserScriptError:\nExitCode 1 in exit code: 42."}, 42),
        ({"TrainingJobStatus": "Failed", "FailureReason": "CapacityError: Unable to provision"}, 1),
        ({"TrainingJobStatus": "Failed", "FailureReason": "a host exited, exit code: 0"}, 1),
        ({"TrainingJobStatus": "Failed"}, 1),
        ({"HyperParameterTuningJobStatus": "Failed"}, 1),
    ],
)
def test_the_exit_code_is_that_of_the_job(description, code):
    """The exit code is the one that the service reports; a job that did not complete never yields 0."""
    assert exit_code(description) == code
