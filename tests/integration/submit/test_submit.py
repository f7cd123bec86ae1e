"""``lightning-sm submit`` against a fake service on this machine. Nothing is ever sent to AWS."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from lightning_sm._untested import SERVICE
from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.s3 import fake_s3
from tests.fakes.sagemaker_service import FakeService, process_environment
from tests.integration.launching import train

ROOT = Path(__file__).parents[3]
JOB = {
    "image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/lightning-sm:latest",
    "role": "arn:aws:iam::111122223333:role/training",
    "name": "digits",
    "groups": {"trainer": {"instance_type": "ml.g5.xlarge", "count": 2}, "data": {"instance_type": "ml.c6i.4xlarge"}},
    "channels": {
        "training": {"uri": "s3://bucket/data", "groups": ["data"]},
        "other": {"uri": "s3://bucket/other", "mode": "FastFile"},
    },
    "hyperparameters": {"data.batch_size": 64, "nothing": None, "name": "a b"},
    "environment": {"NAME": "value"},
    "output": "s3://bucket/output",
    "checkpoints": "s3://bucket/checkpoints",
    "metrics": ["val_acc"],
    "max_run_s": 3600,
    "spot": {"max_wait_s": 7200},
    "retries": {"max_tries": 2, "first_pause_s": 0.01, "max_pause_s": 0.01},
    "max_restarts": 3,
    "volume_gb": 50,
    "tags": {"project": "digits"},
    "request": {
        "TensorBoardOutputConfig": {"S3OutputPath": "s3://bucket/tensorboard"},
        "OutputDataConfig": {"KmsKeyId": "alias/models"},
        "ResourceConfig": {
            "VolumeKmsKeyId": "alias/disks",
            "TrainingPlanArn": "arn:aws:sagemaker:us-east-1:111122223333:training-plan/plan",
        },
        "RetryStrategy": {"MaximumRetryAttempts": 2},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "EnableNetworkIsolation": True,
        "EnableInterContainerTrafficEncryption": True,
        "RemoteDebugConfig": {"EnableRemoteDebug": True},
        "InputDataConfig": [
            {
                "ChannelName": "shared",
                "DataSource": {
                    "FileSystemDataSource": {
                        "FileSystemId": "fs-0123456789abcdef0",
                        "FileSystemType": "FSxLustre",
                        "DirectoryPath": "/abcdefgh/data",
                        "FileSystemAccessMode": "rw",
                    }
                },
            }
        ],
    },
}
# The request that the job must produce.
REQUEST = {
    "AlgorithmSpecification": {
        "TrainingInputMode": "File",
        "TrainingImage": JOB["image"],
        "MetricDefinitions": [{"Name": "val_acc", "Regex": " val_acc=(-?[0-9.]+(?:e[-+][0-9]+)?)"}],
    },
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/output", "KmsKeyId": "alias/models"},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
    "ResourceConfig": {
        "VolumeSizeInGB": 50,
        "VolumeKmsKeyId": "alias/disks",
        "TrainingPlanArn": "arn:aws:sagemaker:us-east-1:111122223333:training-plan/plan",
        "InstanceGroups": [
            {"InstanceGroupName": "trainer", "InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
            {"InstanceGroupName": "data", "InstanceType": "ml.c6i.4xlarge", "InstanceCount": 1},
        ],
    },
    "RoleArn": JOB["role"],
    "InputDataConfig": [
        {
            "ChannelName": "training",
            "InputMode": "File",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": "s3://bucket/data",
                    "S3DataDistributionType": "FullyReplicated",
                    "InstanceGroupNames": ["data"],
                }
            },
        },
        {
            "ChannelName": "other",
            "InputMode": "FastFile",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": "s3://bucket/other",
                    "S3DataDistributionType": "FullyReplicated",
                    "InstanceGroupNames": ["trainer", "data"],
                }
            },
        },
        {
            "ChannelName": "shared",
            "DataSource": {
                "FileSystemDataSource": {
                    "FileSystemId": "fs-0123456789abcdef0",
                    "FileSystemType": "FSxLustre",
                    "DirectoryPath": "/abcdefgh/data",
                    "FileSystemAccessMode": "rw",
                }
            },
        },
    ],
    "HyperParameters": {"data.batch_size": "64", "nothing": "null", "name": '"a b"'},
    "Environment": {"NAME": "value", "LIGHTNING_SM_JOB_SECRET": "(hidden)", "LIGHTNING_SM_MAX_RESTARTS": "3"},
    "Tags": [{"Key": "project", "Value": "digits"}],
    "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
    "EnableInterContainerTrafficEncryption": True,
    "EnableNetworkIsolation": True,
    "EnableManagedSpotTraining": True,
    "CheckpointConfig": {"S3Uri": "s3://bucket/checkpoints"},
    "TensorBoardOutputConfig": {"S3OutputPath": "s3://bucket/tensorboard"},
    "RemoteDebugConfig": {"EnableRemoteDebug": True},
    "RetryStrategy": {"MaximumRetryAttempts": 2},
    "ProfilerConfig": {"DisableProfiler": True},
}
WITH_NETWORK = {name: value for name, value in JOB["request"].items() if name != "EnableNetworkIsolation"}
COMPLETED = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}


@pytest.fixture
def service():
    """A fake AWS on this machine."""
    with FakeService() as fake:
        yield fake


@pytest.fixture
def submit(service, tmp_path):
    """A function that runs the command on a job, in a separate process."""

    def run(job, *options, environment=None, **settings):
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False))
        command = [sys.executable, "-m", "lightning_sm", "submit", str(path), *options]
        account = service.environment if environment is None else environment
        env = {**process_environment(account), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False, **settings
        )

    return run


def plain(request):
    """A request without its name."""
    return {name: value for name, value in request.items() if name != "TrainingJobName"}


def test_a_dry_run_shows_the_request_and_sends_nothing(submit, service):
    """Every key of the job file reaches the request, even without credentials; only secrets are hidden."""
    environment = {name: value for name, value in service.environment.items() if "ACCESS_KEY" not in name}
    job = {
        **JOB,
        "environment": {**JOB["environment"], "HF_TOKEN": "S3CR3T"},
        "hyperparameters": {**JOB["hyperparameters"], "api_key": "S3CR3T", "logger": {"x": "a", "token": "S3CR3T"}},
        "not_secret": ["HF_TOKEN", "api_key", "logger.token"],
    }
    ended = submit(job, "--dry-run", environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "S3CR3T" not in ended.stdout + ended.stderr
    request = plain(json.loads(ended.stdout))
    secrets = {"api_key": "(hidden)", "logger": "(hidden)"}
    assert request == {
        **REQUEST,
        "Environment": {**REQUEST["Environment"], "HF_TOKEN": "(hidden)"},
        "HyperParameters": {**REQUEST["HyperParameters"], **secrets},
    }
    assert service.seen == []
    *_, warning, last = ended.stderr.splitlines()
    assert warning.startswith("lightning-sm: warning: the account was not checked: No AWS credentials: run 'aws conf")
    assert last == "lightning-sm: 0 problems; nothing was sent"


def test_a_dry_run_looks_at_the_account(submit, service):
    """With credentials, a dry run reports a submission's problems, with AWS's list prices, and changes nothing."""
    service.images = ["1"]
    ended = submit(JOB, "--dry-run")
    assert ended.returncode == 2
    assert re.search(r"job\.yaml:\d+: image is .*, which is not in ECR", ended.stderr), ended.stderr
    service.images, service.prices = ["latest"], {"ml.g5.xlarge": 1.5, "ml.c6i.4xlarge": 0.75}
    ended = submit({**JOB, "max_cost": 3.7}, "--dry-run")
    assert ended.returncode == 2
    assert "max_cost is 3.7, but the job can cost $3.75" in ended.stderr
    ended = submit({**JOB, "max_cost": 3.8}, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["RoleArn"] == JOB["role"]
    assert {line.split()[0] for line in service.seen} == {"POST", "HEAD"}
    assert set(service.operations) == {"DescribeImages", "GetProducts"}


def test_a_dry_run_outlives_credentials_that_are_not_accepted(submit, service):
    """Rejected credentials cause only a warning, because the job does not contain them."""
    service.has_valid_key = False
    ended = submit(JOB, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert "warning: the account was not checked: AWS does not accept your credentials" in ended.stderr
    assert service.operations == []


def test_without_another_region_a_job_has_that_of_its_image(submit, service):
    """Without a configured region, a job runs in its image's region; without one there, its image is the problem."""
    environment = {name: value for name, value in service.environment.items() if name != "AWS_DEFAULT_REGION"}
    for mode in ("--dry-run", "--no-wait"):
        ended = submit(JOB, mode, "--yes", environment=environment)
        assert ended.returncode == 0, ended.stderr
    assert len(service.requests) == 1
    ended = submit({**JOB, "image": "here:1"}, "--dry-run", environment=environment)
    assert ended.returncode == 2
    assert "job.yaml:1: image is 'here:1'; SageMaker needs an image in Amazon ECR" in ended.stderr


def test_the_cloud_gets_what_the_dry_run_shows(submit, service):
    """The job is sent once, with a secret that is never shown, and watched until it ends; nothing else is sent."""
    service.endings, service.lines = [COMPLETED], None
    ended = submit(JOB, "--yes")
    assert ended.returncode == 0, ended.stderr
    (request,) = service.requests
    secret = request["Environment"].pop("LIGHTNING_SM_JOB_SECRET")
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert secret not in ended.stdout + ended.stderr
    request["Environment"] |= {"LIGHTNING_SM_JOB_SECRET": "(hidden)"}
    assert plain(request) == REQUEST
    assert re.fullmatch(r"digits-[0-9a-f-]+", request["TrainingJobName"])
    assert f"Job {request['TrainingJobName']} is Completed" in ended.stderr
    assert f"No report was written here: {request['TrainingJobName']} has no record in s3://bucket/ch" in ended.stderr
    assert {line.split()[0] for line in service.seen} == {"POST", "HEAD", "GET"}


@pytest.mark.parametrize(
    ("answer", "options", "is_sent"), [("y\n", [], True), ("\n", [], False), ("\n", ["--yes"], True)]
)
def test_a_terminal_is_asked_with_what_the_job_can_cost(submit, service, answer, options, is_sent):
    """Nothing is sent without a yes or --yes; the question shows the cost at the user's prices."""
    job = {**JOB, "prices": {"ml.g5.xlarge": 1.5, "data": 0.5}, "max_cost": 4}
    terminal, keyboard = os.openpty()
    with os.fdopen(terminal, "w") as typed, os.fdopen(keyboard) as stdin:
        typed.write(answer)
        typed.flush()
        ended = submit(job, "--no-wait", *options, stdin=stdin)
    assert ended.returncode == (0 if is_sent else 2), ended.stderr
    assert len(service.requests) == is_sent
    assert ("The job can cost $3.50 (" in ended.stderr) is not bool(options)
    assert ("The job was not confirmed; nothing was sent." in ended.stderr) is not is_sent


def test_a_script_must_say_yes(submit, service):
    """Without a terminal and without --yes, the command prints what the job can cost and sends nothing."""
    ended = submit({**JOB, "prices": {"ml.g5.xlarge": 1.5, "data": 0.5}})
    assert ended.returncode == 2
    assert "The job can cost $3.50 (" in ended.stderr
    assert "Nothing was sent: stdin is not a terminal. Add --yes to submit without a prompt." in ended.stderr
    assert service.requests == []


def test_prices_that_the_job_file_lacks_come_from_the_price_list(submit, service):
    """AWS's list supplies missing prices for the question and for max_cost, with or without a terminal."""
    service.prices = {"ml.g5.xlarge": 1.5, "ml.c6i.4xlarge": 0.75}
    ended = submit({**JOB, "max_cost": 3.8}, "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert "From AWS's price list for us-east-1, per hour on demand: ml.g5.xlarge $1.50" in ended.stderr
    ended = submit({**JOB, "max_cost": 3.7}, "--yes")
    assert ended.returncode == 2, ended.stderr
    assert "max_cost is 3.7, but the job can cost $3.75" in ended.stderr
    service.prices = None
    ended = submit({**JOB, "max_cost": 3.8}, "--yes")
    assert ended.returncode == 2, ended.stderr
    assert "there is no price for ml.g5.xlarge" in ended.stderr
    assert len(service.requests) == 1


def test_a_job_over_its_cost_limit_is_refused_by_a_dry_run(submit, service):
    """A dry run names the line of max_cost and sends nothing."""
    ended = submit({**JOB, "prices": {"ml.g5.xlarge": 1.5, "data": 0.5}, "max_cost": 3}, "--dry-run")
    assert ended.returncode == 2
    assert re.search(r"job\.yaml:\d+: max_cost is 3, but the job can cost \$3\.50", ended.stderr), ended.stderr
    assert service.seen == []


@pytest.mark.proof  # the rule has unit tests
def test_no_capacity_is_tried_again(submit, service):
    """After a CapacityError, the job is submitted again under another name, and the last try's exit code counts."""
    service.endings = [{"TrainingJobStatus": "Failed", "FailureReason": "CapacityError: none left"}, COMPLETED]
    ended = submit(JOB, "--yes")
    assert ended.returncode == 0, ended.stderr
    assert len({request["TrainingJobName"] for request in service.requests}) == 2
    assert "Try 1 of 2 got no hosts (CapacityError: none left)" in ended.stderr


def test_a_failed_job_is_a_failed_command(submit, service):
    """If the job fails, the command reports its reason, exits with its code, and does not try again."""
    service.endings = [{"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: nan, exit code: 3"}]
    service.lines = None
    ended = submit(JOB, "--yes")
    assert ended.returncode == 3
    assert "the job did not complete: AlgorithmError: nan, exit code: 3" in ended.stderr
    assert len(service.requests) == 1


@pytest.mark.proof  # following a job has separate tests
def test_the_log_of_the_job_is_all_that_is_written_to_stdout(submit, service):
    """Only the job's log goes to stdout; messages about the job go to stderr."""
    service.endings = [COMPLETED]
    service.lines = ["epoch=1/2", "epoch=2/2"]
    ended = submit(JOB, "--yes")
    assert ended.returncode == 0, ended.stderr
    lines = [line.split(" ", 2)[2] for line in ended.stdout.splitlines()]  # without their time
    assert lines == ["algo-1 | epoch=1/2", "algo-1 | epoch=2/2"]


@pytest.mark.proof  # in make test, test_dry_run.py covers tuning jobs
def test_a_tuning_job_is_made_of_the_same_request(submit, service, tmp_path):
    """The code is uploaded, and settings that a tuning job cannot have are dropped with a warning."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "go.py").write_text("print(1)")
    ranges = {"lr": {"min": 0.001, "max": 0.1}, "optimizer": {"values": ["adam", "sgd"]}}
    tune = {"objective": "val_loss", "direction": "minimize", "ranges": ranges}
    job = {**JOB, "tune": tune, "source_dir": "src", "script": "go.py", "request": WITH_NETWORK}
    ended = submit(job, "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    (sent,) = service.tuning
    assert len(service.uploads) == 1
    assert sent["Tags"] == REQUEST["Tags"]
    definition = sent["TrainingJobDefinition"]
    names = [definition["AlgorithmSpecification"]["MetricDefinitions"][index]["Name"] for index in range(2)]
    assert names == ["val_acc", "val_loss"]
    assert definition["StaticHyperParameters"].items() >= REQUEST["HyperParameters"].items()
    assert definition["InputDataConfig"] == REQUEST["InputDataConfig"]
    for key in ("TensorBoardOutputConfig", "RemoteDebugConfig"):
        assert f"warning: {key} is ignored" in ended.stderr
    assert f"Submitted {sent['HyperParameterTuningJobName']}" in ended.stderr
    assert service.requests == []


@pytest.mark.proof
def test_a_missing_folder_is_no_traceback(submit, service):
    """The pre-flight rules report a missing folder before the SDK trips over it."""
    ended = submit({**JOB, "source_dir": "nope"}, "--dry-run")
    assert ended.returncode == 2
    assert "nope', which is not a directory" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert service.seen == []


@pytest.mark.proof
def test_a_dry_run_does_not_read_the_code(submit, service, tmp_path):
    """A dry run accepts a file so large that it would be uploaded in parts."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "go.py").touch()
    with (tmp_path / "src" / "weights").open("wb") as file:
        file.truncate(20_000_000)
    job = {**JOB, "source_dir": "src", "script": "go.py", "request": WITH_NETWORK}
    ended = submit(job, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    uri = json.loads(json.loads(ended.stdout)["HyperParameters"]["sagemaker_submit_directory"])
    assert re.fullmatch(r"s3://bucket/output/digits-[0-9a-f-]+/source/sourcedir.tar.gz", uri)
    assert service.uploads == []


@pytest.mark.proof
def test_a_refusal_is_no_traceback(submit, service):
    """The service's error is reported without a traceback, after as many tries as make sense."""
    service.refusals = ["ResourceLimitExceeded", "ValidationException"]
    ended = submit(JOB, "--yes")
    assert ended.returncode == 2
    assert "ValidationException" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(service.requests) == 2


@pytest.mark.proof
def test_without_waiting_the_command_returns_at_once(submit, service):
    """--no-wait returns as soon as the service has accepted the job."""
    service.endings = [{"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"}]
    ended = submit(JOB, "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert len(service.requests) == 1


def test_a_job_with_problems_is_not_sent(submit, service):
    """All problems are reported at once: those found by the rules, or else those found by the service's model."""
    ended = submit({**JOB, "name": "a_b", "role": None}, "--yes", "--groups.trainer.instance_type=ml.g5.xlarg")
    job = {**JOB, "environment": {"a-b": "x" * 513}, "request": {"ResourceConfig": {"KeepAlivePeriodInSeconds": 30000}}}
    limited = submit(job, "--yes")
    for code, text, words in [
        (ended.returncode, ended.stderr, ["name is 'a_b'", "role", "Did you mean ml.g5.xlarge?"]),
        (limited.returncode, limited.stderr, ["'a-b'", "513 characters", "30000"]),
    ]:
        assert code == 2
        assert "nothing was sent" in text
        for word in words:
            assert word in text
    assert service.seen == []


def test_own_code_is_uploaded_and_started_by_the_image(submit, service, tmp_path):
    """The code is uploaded as an archive beside the output; the request has its address and the script's name."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "go.py").write_text("print(1)")
    job = {**JOB, "source_dir": "src", "script": "package/go.py", "request": WITH_NETWORK}
    ended = submit(job, "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    (upload,) = service.uploads
    (request,) = service.requests
    assert upload == f"/bucket/output/{request['TrainingJobName']}/source/sourcedir.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(service.objects[upload])) as archive:
        assert archive.getnames() == ["package", "package/go.py"]
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["training", "other", "shared"]
    assert request["HyperParameters"]["sagemaker_program"] == '"package/go.py"'
    assert request["HyperParameters"]["sagemaker_submit_directory"] == f'"s3:/{upload}"'


def test_the_host_runs_what_was_submitted(submit, service, tmp_path):
    """The launcher finds the archive from the request alone, and passes the script its options."""
    source = tmp_path / "src"
    (source / "package").mkdir(parents=True)
    (source / "package" / "go.py").write_text("import sys, helper\nprint(helper.NAME, sys.argv[1:])")
    (tmp_path / "helper.py").write_text("NAME = 'linked'")
    (source / "helper.py").symlink_to(tmp_path / "helper.py")
    job = {**JOB, "source_dir": "src", "script": "package/go.py", "request": WITH_NETWORK}
    ended = submit(job, "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    (request,) = service.requests
    groups = resource_config({"trainer": ["algo-1"]}, "algo-1")
    hyperparameters = json.loads(json.dumps(request["HyperParameters"]).replace("/opt/ml", f"{tmp_path}/ml"))
    base = write_job(tmp_path / "ml", groups, hyperparameters=hyperparameters)
    (tmp_path / "work").mkdir()
    with fake_s3() as s3:
        s3.objects.update(service.objects)
        ran = train(base, tmp_path / "work", **s3.variables)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "linked ['--data.batch_size=64', '--name=a b', '--nothing=null']\n"


@pytest.mark.proof  # the parts have unit tests
def test_without_an_output_the_bucket_of_the_account_is_used(submit, service):
    """The default bucket is created for the first job and reused for the second."""
    service.endings = [COMPLETED, COMPLETED]
    job = {name: value for name, value in JOB.items() if name != "output"}
    bucket = "sagemaker-us-east-1-111122223333"
    for said in (True, False):
        ended = submit(job, "--yes")
        assert ended.returncode == 0, ended.stderr
        assert (f"created the bucket {bucket}" in ended.stderr) is said
    assert {request["OutputDataConfig"]["S3OutputPath"] for request in service.requests} == {f"s3://{bucket}/"}
    assert [line for line in service.seen if line.startswith("PUT")] == [f"PUT /{bucket}"]


def test_a_lost_answer_does_not_make_a_second_job(submit, service):
    """The request is not repeated; the command warns that the job may run, and how to find and stop it."""
    service.endings = [COMPLETED]
    service.lost = 1
    ended = submit(JOB, "--yes")
    assert ended.returncode == 2, ended.stderr
    assert [operation for operation in service.operations if operation.endswith("TrainingJob")] == ["CreateTrainingJob"]
    (request,) = service.requests
    assert f"lightning-sm jobs logs {request['TrainingJobName']}" in ended.stderr


@pytest.mark.matrix(first=1)  # each row has unit tests
@pytest.mark.parametrize(
    ("variables", "mode", "words"),
    [
        (["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "--yes", "No AWS credentials"),
        (["AWS_SECRET_ACCESS_KEY"], "--yes", "AWS credentials cannot be read: Partial credentials found in env"),
    ],
)
def test_what_is_missing_on_this_machine_is_said(submit, service, variables, mode, words):
    """Missing or partial credentials are reported with a remedy."""
    environment = {name: value for name, value in service.environment.items() if name not in variables}
    ended = submit(JOB, mode, environment=environment)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert service.seen == []


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("options", [["--local", "--dry-run"], ["--dry-run", "--nonsense=1"]])
def test_a_wrong_command_line_says_how_it_goes(submit, service, options):
    """Conflicting modes and unknown options are answered with the usage line."""
    ended = submit(JOB, *options)
    assert ended.returncode == 2
    assert "lightning-sm submit JOB.yaml [--dry-run | --local]" in ended.stderr
    assert service.seen == []


def test_help_names_every_key(submit):
    """The command's help documents every key of the job file."""
    ended = submit(JOB, "--help")
    assert ended.returncode == 0
    for key in JOB:
        assert f"--{key} " in ended.stdout
    assert SERVICE in " ".join(ended.stdout.split()), "what has never run says so before it is used"


@pytest.mark.parametrize("mode", ["--dry-run", "--yes"])
def test_submitting_needs_neither_torch_nor_the_sdk(service, tmp_path, mode):
    """Submitting, with code and a log, works without torch, Lightning, gRPC and the SDK."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "go.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({**JOB, "source_dir": "src", "script": "go.py", "request": WITH_NETWORK})
    )
    service.endings, service.lines = [COMPLETED], ["epoch=1/2"]
    code = (
        "import sys\n"
        "gone = ('torch', 'pytorch_lightning', 'lightning', 'lightning_fabric', 'torchmetrics', 'grpc', 'numpy')\n"
        "gone += ('sagemaker', 'sagemaker_core', 'jsonargparse', 'pydantic', 'h2', 'cloudpickle')\n"
        "sys.modules.update(dict.fromkeys(gone))\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *package: None if name in gone else find(name, *package)\n"
        "from lightning_sm.__main__ import main\n"
        f"sys.exit(main(['submit', 'job.yaml', {mode!r}]))"
    )
    env = {**process_environment(service.environment), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(service.requests) == (mode == "--yes") == done.stdout.count("algo-1 | epoch=1/2")


def test_the_launcher_loads_nothing_of_this():
    """The launcher does not import the SDK's libraries."""
    code = "import sys, lightning_sm.__main__; print({'boto3', 'jsonargparse', 'sagemaker'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
