"""The request of stock SDK v2 for the same job: the image must find code and settings whichever client sends it."""

import io
import json
import subprocess
import sys
import tarfile

import pytest
import yaml

from lightning_sm.job.variables import JOB_SECRET
from tests.fakes.sagemaker_service import FakeService, process_environment
from tests.integration.submit.test_submit import COMPLETED, JOB, ROOT, WITH_NETWORK

pytestmark = pytest.mark.sdk2

# As in docs/sdk.md, with every argument that has a key in the job file.
ESTIMATOR = """
import json, os, sys
import sagemaker.session
from sagemaker.debugger import TensorBoardOutputConfig
from sagemaker.estimator import Estimator
from sagemaker.inputs import FileSystemInput, TrainingInput
from sagemaker.instance_group import InstanceGroup

# The SDK's own choice would be AWS's, whatever AWS_ENDPOINT_URL says.
sagemaker.session.sts_regional_endpoint = lambda region: os.environ["AWS_ENDPOINT_URL"]
job = json.load(sys.stdin)
more = job["request"]
inputs = {
    name: TrainingInput(
        channel["uri"],
        input_mode=channel.get("mode", "File"),
        distribution="FullyReplicated",
        instance_groups=channel.get("groups", ["trainer", "data"]),
    )
    for name, channel in job["channels"].items()
}
inputs["shared"] = FileSystemInput("fs-0123456789abcdef0", "FSxLustre", "/abcdefgh/data", "rw")
Estimator(
    image_uri=job["image"],
    role=job["role"],
    base_job_name=job["name"],
    instance_groups=[InstanceGroup("trainer", "ml.g5.xlarge", 2), InstanceGroup("data", "ml.c6i.4xlarge", 1)],
    hyperparameters=job["hyperparameters"],
    environment={**job["environment"], "LIGHTNING_SM_MAX_RESTARTS": "3"},
    metric_definitions=[{"Name": "val_acc", "Regex": " val_acc=(-?[0-9.]+(?:e[-+][0-9]+)?)"}],
    output_path=job.get("output"),
    code_location=job.get("output"),
    entry_point=job["script"],
    source_dir=job["source_dir"],
    output_kms_key=more["OutputDataConfig"]["KmsKeyId"],
    volume_size=job["volume_gb"],
    volume_kms_key=more["ResourceConfig"]["VolumeKmsKeyId"],
    training_plan=more["ResourceConfig"]["TrainingPlanArn"],
    checkpoint_s3_uri=job["checkpoints"],
    tensorboard_output_config=TensorBoardOutputConfig(more["TensorBoardOutputConfig"]["S3OutputPath"]),
    max_run=job["max_run_s"],
    use_spot_instances=True,
    max_wait=job["spot"]["max_wait_s"],
    max_retry_attempts=2,
    encrypt_inter_container_traffic=True,
    enable_network_isolation="EnableNetworkIsolation" in more,
    subnets=more["VpcConfig"]["Subnets"],
    security_group_ids=more["VpcConfig"]["SecurityGroupIds"],
    tags=[{"Key": "project", "Value": "digits"}],
    enable_remote_debug=True,
    debugger_hook_config=False,
    disable_profiler=True,
).fit(inputs, wait=False)
"""
# Only sagemaker-training reads these, and it has a default for each.
TOOLKIT_ONLY = {"sagemaker_container_log_level", "sagemaker_job_name", "sagemaker_region"}


def sent(command, folder, variables, text=""):
    """Return a command's request and upload, without the parts that differ between jobs: name and secret."""
    with FakeService(endings=[COMPLETED]) as service:
        env = {**process_environment(service.environment), **variables, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            command, cwd=folder, env=env, input=text, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (request,) = service.requests
        (path,) = service.uploads
        archive = service.objects[path]
    name = request.pop("TrainingJobName")
    request = json.loads(json.dumps(request).replace(name, "NAME"))
    request["HyperParameters"] = {
        key: value for key, value in request["HyperParameters"].items() if key not in TOOLKIT_ONLY
    }
    request["Environment"].pop(JOB_SECRET.name, None)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {
            member.name: (member.mode, tar.extractfile(member).read() if member.isfile() else None)
            for member in tar.getmembers()
        }
    return request, path.replace(name, "NAME"), members


@pytest.mark.parametrize(
    "changes", [pytest.param({}, id="stated output"), pytest.param({"output": None}, id="default bucket")]
)
def test_the_service_gets_what_the_stock_estimator_sends(tmp_path, sdk2_python, changes):
    """The requests are equal, and the code is at the same place in S3, with the same files."""
    source = tmp_path / "src"
    (source / "package" / "empty").mkdir(parents=True)
    (source / "package" / "go.py").write_text("print(1)")
    (source / "run.sh").write_text("python go.py")
    (source / "run.sh").chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "helper.py").write_text("x = 1")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "helper.py").symlink_to(tmp_path / "elsewhere" / "helper.py")
    job = {**JOB, "source_dir": "src", "script": "package/go.py", "request": WITH_NETWORK, **changes}
    job = {key: value for key, value in job.items() if value is not None}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    (tmp_path / "sagemaker.yaml").write_text(
        'SchemaVersion: "1.0"\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n'
    )
    ours = sent([sys.executable, "-m", "lightning_sm", "submit", "job.yaml", "--yes"], tmp_path, {})
    variables = {"SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "sagemaker.yaml")}
    theirs = sent([str(sdk2_python), "-c", ESTIMATOR], tmp_path, variables, json.dumps(job))
    for request, *_ in (ours, theirs):
        request["InputDataConfig"].sort(key=lambda channel: channel["ChannelName"])
    assert ours == theirs
