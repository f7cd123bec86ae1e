"""``submit_job``, the submit command as a function."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fakes.sagemaker_service import FakeService, process_environment
from tests.integration.submit.test_submit import COMPLETED, JOB

ROOT = Path(__file__).parents[3]
OVERRIDES = {
    "hyperparameters.model.learning_rate": 1e-05,
    "hyperparameters.data.name": "1e-3",
    "groups.trainer.count": 4,
    "spot": {"max_wait_s": 9000},
    "request": None,
}
SCRIPT = f"""
import json, sys
from lightning_sm import submit_job
answer = submit_job("job.yaml", {OVERRIDES!r}, wait=sys.argv[1] == "wait")
print(json.dumps([answer["TrainingJobName"], answer.get("TrainingJobStatus"), "torch" in sys.modules]))
"""


@pytest.mark.parametrize("waiting", ["wait", "at once"])
def test_a_job_is_submitted_from_python(tmp_path, waiting):
    """Overrides of any type replace values of the job file; the answer has the name and, after waiting, the status."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB, sort_keys=False))
    with FakeService() as service:
        service.endings = [COMPLETED]
        ended = _run(service, tmp_path, "-c", SCRIPT, waiting)
        assert ended.returncode == 0, ended.stderr
        (request,) = service.requests
    name, status, has_torch = json.loads(ended.stdout)
    assert (name, status) == (request["TrainingJobName"], "Completed" if waiting == "wait" else None)
    assert not has_torch
    assert float(request["HyperParameters"]["model.learning_rate"]) == 1e-05
    assert request["HyperParameters"]["data.name"] == '"1e-3"'
    assert request["ResourceConfig"]["InstanceGroups"][0]["InstanceCount"] == 4
    assert request["StoppingCondition"]["MaxWaitTimeInSeconds"] == 9000
    assert "TensorBoardOutputConfig" not in request


def test_the_app_submits_a_job_for_each_learning_rate(tmp_path):
    """``app/submit.py``, with an account's values in ``app/job.yaml``, names the jobs; boto3 logs nothing."""
    app = shutil.copytree(ROOT / "app", tmp_path / "app")
    account = {"<account>": "111122223333", "<region>": "us-east-1", "<bucket>": "bucket", "<name>": "training"}
    text = (app / "job.yaml").read_text()
    for placeholder, value in account.items():
        text = text.replace(placeholder, value)
    (app / "job.yaml").write_text(text)
    with FakeService() as service:
        ended = _run(service, tmp_path, "app/submit.py", "1e-3", "2e-3")
        assert ended.returncode == 0, ended.stderr
        requests = service.requests
    names = [request["TrainingJobName"] for request in requests]
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("lightning-sm: ")]
    assert lines == [f"learning rate 1e-3: {names[0]}", f"learning rate 2e-3: {names[1]}"]
    assert [float(request["HyperParameters"]["model.learning_rate"]) for request in requests] == [1e-3, 2e-3]


def test_without_boto3_the_error_says_how_to_install_it(tmp_path):
    """The last line of the error names the missing package and the command that installs it."""
    code = "import sys; sys.modules['boto3'] = None; import lightning_sm; lightning_sm.submit_job('job.yaml')"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "submit_job needs boto3, which is not installed: pip install 'boto3" in ended.stderr.splitlines()[-1]


def _run(service: FakeService, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**process_environment(service.environment), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
