"""lightning-sm submit against a service on this machine, with the real SDKs. Nothing is ever sent to AWS."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_sm._untested import SERVICE
from tests.fakes.sagemaker_service import FakeService

ROOT = Path(__file__).parents[3]
SDK3 = ROOT / ".venv-sdk3" / "bin" / "python"
PYTHONS = {"sdk2": sys.executable, "sdk3": str(SDK3)}
JOB = {
    "image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/lightning-sm:latest",
    "role": "arn:aws:iam::111122223333:role/training",
    "name": "digits",
    "groups": {
        "trainer": {"instance_type": "ml.g5.xlarge", "count": 2},
        "data": {"instance_type": "ml.c6i.4xlarge"},
    },
    "channels": {
        "training": {"uri": "s3://bucket/data", "groups": ["data"]},
        "other": {"uri": "s3://bucket/other", "mode": "FastFile", "content_type": "text/csv"},
        "shared": {"uri": "fsx://fs-0123456789abcdef0/abcdefgh/data", "access": "rw"},
    },
    "hyperparameters": {"data.batch_size": 64, "nothing": None, "name": "a b"},
    "environment": {"NAME": "value"},
    "output": "s3://bucket/output",
    "checkpoints": "s3://bucket/checkpoints",
    "tensorboard": "s3://bucket/tensorboard",
    "metrics": ["val_acc"],
    "max_run_s": 3600,
    "spot": {"max_wait_s": 7200},
    "retries": {"max_tries": 2, "first_pause_s": 0.01, "max_pause_s": 0.01},
    "max_restarts": 3,
    "max_retry_attempts": 2,
    "volume_gb": 50,
    "volume_kms_key": "alias/disks",
    "output_kms_key": "alias/models",
    "training_plan": "arn:aws:sagemaker:us-east-1:111122223333:training-plan/plan",
    "network_isolation": True,
    "encrypt_between_hosts": True,
    "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
    "tags": {"project": "digits"},
    "remote_debug": True,
}
# What the request of the job is to be, whichever SDK makes it.
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
            "ContentType": "text/csv",
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
    "Environment": {
        "NAME": "value",
        "LIGHTNING_SM_JOB_SECRET": "(hidden)",
        "LIGHTNING_SM_MAX_RESTARTS": "3",
    },
    "Tags": [{"Key": "project", "Value": "digits"}],
    "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
    "EnableInterContainerTrafficEncryption": True,
    "EnableNetworkIsolation": True,
    "EnableManagedSpotTraining": True,
    "CheckpointConfig": {"S3Uri": "s3://bucket/checkpoints"},
    "TensorBoardOutputConfig": {"S3OutputPath": "s3://bucket/tensorboard"},
    "RemoteDebugConfig": {"EnableRemoteDebug": True},
    "RetryStrategy": {"MaximumRetryAttempts": 2},
}
# What one of the SDKs says besides: the service's defaults.
DEFAULTS = {
    "OutputDataConfig": {"CompressionType": "GZIP"},
    "CheckpointConfig": {"LocalPath": "/opt/ml/checkpoints"},
    "TensorBoardOutputConfig": {"LocalPath": "/opt/ml/output/tensorboard"},
}
COMPLETED = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}


@pytest.fixture(
    params=[
        pytest.param("sdk2", marks=pytest.mark.sdk2),
        pytest.param("sdk3", marks=pytest.mark.sdk3),
    ]
)
def python(request):
    """An interpreter with version 2 or 3 of the SDK."""
    if request.param == "sdk2" and importlib.util.find_spec("sagemaker") is None:
        pytest.skip("needs version 2 of the SageMaker SDK (extra launch)")
    if request.param == "sdk3" and not SDK3.exists():
        pytest.skip("needs version 3 of the SageMaker SDK: make .venv-sdk3/.ready")
    return PYTHONS[request.param]


@pytest.fixture
def service():
    """AWS, on this machine."""
    with FakeService() as fake:
        yield fake


@pytest.fixture
def submit(python, service, tmp_path):
    """Runs the command on a job, in a process of its own."""

    def run(job, *options, environment=None):
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False))
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS", "SAGEMAKER"))}
        command = [python, "-m", "lightning_sm", "submit", str(path), *options]
        env = {**kept, **(service.environment if environment is None else environment), "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)

    return run


def plain(request):
    """A request without its name and what one of the SDKs says besides."""
    request = {name: value for name, value in request.items() if name not in {"TrainingJobName", "ProfilerConfig"}}
    for name, defaults in DEFAULTS.items():
        assert defaults.items() >= {key: request[name].get(key, value) for key, value in defaults.items()}.items()
        request[name] = {key: value for key, value in request[name].items() if key not in defaults}
    return request


def test_a_dry_run_shows_the_request_and_sends_nothing(submit, service):
    """Every key of the file arrives where the service looks for it, without credentials; only secrets are hidden."""
    environment = {name: value for name, value in service.environment.items() if "ACCESS_KEY" not in name}
    job = {
        **JOB,
        "environment": {**JOB["environment"], "HF_TOKEN": "S3CR3T"},
        "hyperparameters": {
            **JOB["hyperparameters"],
            "api_key": "S3CR3T",
            "logger": {"x": "a" * 3000, "token": "S3CR3T"},
        },
    }
    ended = submit(job, "--dry-run", environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "S3CR3T" not in ended.stdout + ended.stderr
    request = plain(json.loads(ended.stdout))
    secrets = dict.fromkeys(("api_key", "logger__0", "logger__1", "logger__2"), "(hidden)")
    assert request == {
        **REQUEST,
        "Environment": {**REQUEST["Environment"], "HF_TOKEN": "(hidden)"},
        "HyperParameters": {**REQUEST["HyperParameters"], **secrets},
    }
    assert service.seen == []
    assert ended.stderr.splitlines()[-1] == "lightning-sm: 0 problems; nothing was sent"


def test_the_cloud_gets_what_the_dry_run_shows(submit, service):
    """The job is sent once, with a secret that nothing shows, and watched until it ends; nothing else is sent."""
    service.endings = [COMPLETED]
    ended = submit(JOB, "--cloud")
    assert ended.returncode == 0, ended.stderr
    (request,) = service.requests
    secret = request["Environment"].pop("LIGHTNING_SM_JOB_SECRET")
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert secret not in ended.stdout + ended.stderr
    request["Environment"] |= {"LIGHTNING_SM_JOB_SECRET": "(hidden)"}
    assert plain(request) == REQUEST
    assert re.fullmatch(r"digits-[0-9a-f-]+", request["TrainingJobName"])
    assert f"Job {request['TrainingJobName']} is Completed" in ended.stderr
    assert {line.split()[0] for line in service.seen} == {"POST"}


@pytest.mark.proof  # the rule has unit tests
def test_no_capacity_is_tried_again(submit, service):
    """Once as the reason of a job, under another name; the exit code is that of the last one."""
    service.endings = [{"TrainingJobStatus": "Failed", "FailureReason": "CapacityError: none left"}, COMPLETED]
    ended = submit(JOB, "--cloud")
    assert ended.returncode == 0, ended.stderr
    assert len({request["TrainingJobName"] for request in service.requests}) == 2
    assert "No capacity in try 1 of 2 (CapacityError: none left)" in ended.stderr


def test_a_failed_job_is_a_failed_command(submit, service):
    """With the job's reason and its exit code, and without another try."""
    service.endings = [{"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: nan, exit code: 3"}]
    ended = submit(JOB, "--cloud")
    assert ended.returncode == 3
    assert "the job did not complete: AlgorithmError: nan, exit code: 3" in ended.stderr
    assert len(service.requests) == 1


@pytest.mark.proof  # following has tests of its own
def test_the_log_of_the_job_is_all_that_is_written_to_stdout(submit, service):
    """With --follow; what the SDK prints and what happens to the job is on stderr."""
    service.endings = [COMPLETED]
    service.lines = ["epoch=1/2", "epoch=2/2"]
    ended = submit(JOB, "--cloud", "--follow")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["algo-1 | epoch=1/2", "algo-1 | epoch=2/2"]


@pytest.mark.proof  # in make test, test_dry_run.py stands for tuning jobs
def test_a_tuning_job_is_made_of_the_same_request(submit, service, tmp_path):
    """The code is uploaded, and what a tuning job cannot have is left out with a warning."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "go.py").write_text("print(1)")
    ranges = {"lr": {"min": 0.001, "max": 0.1}, "optimizer": {"values": ["adam", "sgd"]}}
    tune = {"objective": "val_loss", "direction": "minimize", "ranges": ranges}
    job = {**JOB, "tune": tune, "source_dir": "src", "script": "go.py"}
    ended = submit(job, "--cloud", "--wait=false")
    assert ended.returncode == 0, ended.stderr
    (sent,) = service.tuning
    assert len(service.uploads) == 1
    assert sent["Tags"] == REQUEST["Tags"]
    definition = sent["TrainingJobDefinition"]
    names = [definition["AlgorithmSpecification"]["MetricDefinitions"][index]["Name"] for index in range(2)]
    assert names == ["val_acc", "val_loss"]
    assert definition["StaticHyperParameters"].items() >= REQUEST["HyperParameters"].items()
    assert definition["InputDataConfig"][:3] == REQUEST["InputDataConfig"]
    for key in ("tensorboard", "remote_debug"):
        assert f"warning: {key} is ignored" in ended.stderr
    assert f"Submitted {sent['HyperParameterTuningJobName']}" in ended.stderr
    assert service.requests == []


@pytest.mark.proof
def test_a_missing_folder_is_no_traceback(submit, service):
    """What the rules say of it is said, and not what the SDK stumbles over."""
    ended = submit({**JOB, "source_dir": "nope"}, "--dry-run")
    assert ended.returncode == 2
    assert "nope', which is not a directory" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert service.seen == []


@pytest.mark.proof
def test_a_dry_run_does_not_read_the_code(submit, service, tmp_path):
    """A file of a size that would be uploaded in parts is no obstacle."""
    (tmp_path / "src").mkdir()
    with (tmp_path / "src" / "weights").open("wb") as file:
        file.truncate(20_000_000)
    ended = submit({**JOB, "source_dir": "src"}, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    uri = json.loads(ended.stdout)["InputDataConfig"][-1]["DataSource"]["S3DataSource"]["S3Uri"]
    assert uri.startswith("s3://bucket/output/digits/code/")
    assert service.seen == []


@pytest.mark.proof
def test_a_refusal_is_no_traceback(submit, service):
    """What the service says is passed on, after as many tries as make sense."""
    service.refusals = ["ResourceLimitExceeded", "ValidationException"]
    ended = submit(JOB, "--cloud")
    assert ended.returncode == 2
    assert "ValidationException" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(service.requests) == 2


@pytest.mark.proof
def test_without_waiting_the_command_returns_at_once(submit, service):
    """Once the service has accepted the job."""
    service.endings = [{"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"}]
    ended = submit(JOB, "--cloud", "--wait=false")
    assert ended.returncode == 0, ended.stderr
    assert len(service.requests) == 1


def test_a_job_with_problems_is_not_sent(submit, service):
    """All of them are said at once, the rules' and the model's."""
    job = {**JOB, "name": "a_b", "role": None, "environment": {"a-b": "x" * 513}, "keep_alive_s": 30000}
    ended = submit(job, "--cloud", "--groups.trainer.instance_type=ml.g5.xlarg")
    assert ended.returncode == 2
    for word in ["name is 'a_b'", "role", "'a-b'", "513 characters", "30000", "2 groups", "ml.g5.xlarge"]:
        assert word in ended.stderr
    assert "nothing was sent" in ended.stderr
    assert service.seen == []


def test_own_code_is_uploaded_and_started_by_the_image(submit, service, tmp_path):
    """Below the output, as a channel of all groups; the launcher is told where it is and what to start."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "go.py").write_text("print(1)")
    service.endings = [COMPLETED]
    job = {**JOB, "source_dir": "src", "script": "package/go.py", "subcommand": "test"}
    ended = submit(job, "--cloud")
    assert ended.returncode == 0, ended.stderr
    (upload,) = service.uploads
    assert re.fullmatch(r"/bucket/output/digits/code/[0-9a-f-]+/package/go.py", upload)
    (request,) = service.requests
    channel = request["InputDataConfig"][-1]
    assert channel["ChannelName"] == "lightning_sm_code"
    source = channel["DataSource"]["S3DataSource"]
    assert source["S3Uri"] == f"s3:/{upload.removesuffix('/package/go.py')}"
    assert source["InstanceGroupNames"] == ["trainer", "data"]
    assert request["HyperParameters"]["sagemaker_program"] == '"package/go.py"'
    assert request["HyperParameters"]["sagemaker_submit_directory"] == '"/opt/ml/input/data/lightning_sm_code"'
    assert request["HyperParameters"]["subcommand"] == '"test"'


@pytest.mark.matrix(first=1)  # each has unit tests
@pytest.mark.parametrize(
    ("variables", "mode", "words"),
    [
        (["AWS_DEFAULT_REGION"], "--dry-run", "No AWS region"),
        (["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "--cloud", "No AWS credentials"),
    ],
)
def test_what_is_missing_on_this_machine_is_said(submit, service, variables, mode, words):
    """Region or credentials; with what to do."""
    environment = {name: value for name, value in service.environment.items() if name not in variables}
    ended = submit(JOB, mode, environment=environment)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert service.seen == []


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("options", [[], ["--local", "--cloud"], ["--dry-run", "--nonsense=1"]])
def test_a_wrong_command_line_says_how_it_goes(submit, service, options):
    """Exactly one thing to do, and no unknown option."""
    ended = submit(JOB, *options)
    assert ended.returncode == 2
    assert "lightning-sm submit JOB.yaml (--dry-run | --local | --cloud)" in ended.stderr
    assert service.seen == []


def test_help_names_every_key(submit):
    """The job file is documented by the command itself."""
    ended = submit(JOB, "--help")
    assert ended.returncode == 0
    for key in JOB:
        assert f"--{key} " in ended.stdout
    assert SERVICE in " ".join(ended.stdout.split()), "what has never run says so before it is used"


def test_the_launcher_loads_nothing_of_this():
    """Hosts start without the SDK's libraries."""
    code = "import sys, lightning_sm.__main__; print({'boto3', 'jsonargparse', 'sagemaker'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
