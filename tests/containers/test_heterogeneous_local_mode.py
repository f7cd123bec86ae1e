"""Jobs with instance groups in local mode: the real SDK, the real image, a container for each host."""

from pathlib import Path

import pytest

from tests.containers import own_code
from tests.containers.local_mode import HETEROGENEOUS, fit

pytestmark = [pytest.mark.docker, pytest.mark.sdk2]

SCRIPTS = Path(__file__).parent / "scripts"
GROUPS = [["data", "ml.c5.xlarge", 1], ["trainer", "ml.g5.xlarge", 2]]
# Deals the host in the middle to the data group: were it ignored, node rank 1 would not be algo-3.
SEED, DATA_HOST, FIRST_TRAINER, SECOND_TRAINER = 1, "algo-2", "algo-1", "algo-3"


@pytest.fixture(autouse=True)
def _sdk():
    pytest.importorskip("sagemaker.local", reason="needs sagemaker[local] 2 (extra launch)", exc_type=ImportError)


@pytest.fixture
def run(image, tmp_path):
    """Run a script in the image on a data host, which alone has the channel "training", and two trainer hosts."""

    def fit_script(script, environment=None, **arguments):
        data = tmp_path / "data"
        data.mkdir()
        (data / "points.txt").write_text(" ".join(str(number / 16) for number in range(16)))
        settings = {
            "image_uri": image,
            "entry_point": script,
            "source_dir": str(SCRIPTS),
            "instance_groups": GROUPS,
            "environment": {**own_code.ENVIRONMENT, **(environment or {})},
        }
        inputs = {"training": {"s3_data": data.as_uri(), "instance_groups": ["data"]}}
        session = {"session": HETEROGENEOUS, "session_arguments": {"seed": SEED}}
        return fit(tmp_path / "job", {**settings, **arguments}, inputs, **session)

    return fit_script


def test_a_data_host_feeds_two_trainers(run):
    """All containers end with 0; only the data host sees the channel; the model is written once, by node rank 0."""
    job = run("train_with_groups.py", environment={"SAGEMAKER_PROGRAM": "train_with_groups.py"})
    assert job.has_succeeded, job
    seen = {host: job.json(f"data/{host}.json") for host in sorted(job.exit_codes)}
    assert {host: facts["group"] for host, facts in seen.items()} == {
        FIRST_TRAINER: "trainer",
        DATA_HOST: "data",
        SECOND_TRAINER: "trainer",
    }
    assert {host: facts["channels"] for host, facts in seen.items()} == {
        FIRST_TRAINER: [],
        DATA_HOST: ["training"],
        SECOND_TRAINER: [],
    }
    assert seen[FIRST_TRAINER]["model"] == sorted(job.model) == ["config.yaml", "model.ckpt", "state_dict.pt"]
    assert seen[SECOND_TRAINER]["model"] == []
    assert "failure" not in job.artifacts


@pytest.mark.proof
def test_a_failing_trainer_fails_the_job_on_every_trainer(run):
    """When one trainer fails, no trainer ends with 0; the data host is done; its reason is in the failure file."""
    environment = {"SAGEMAKER_PROGRAM": "train_with_groups.py", "FAILS_ON": "1"}
    job = run("train_with_groups.py", environment=environment)
    assert not job.has_succeeded, job
    assert job.exit_codes[SECOND_TRAINER] == 1, job
    assert job.exit_codes[FIRST_TRAINER] not in {0, None}, job
    assert job.exit_codes[DATA_HOST] == 0, job
    assert "ArithmeticError: the loss is no number" in job.logs[SECOND_TRAINER]
    assert b"ArithmeticError: the loss is no number" in job.artifacts["failure"]
    assert job.model == {}


@pytest.mark.proof
def test_hosts_of_all_groups_find_each_other_and_share_no_model_folder(run):
    """Any program, without our launcher: hosts reach each other by name, and each sees its own model only."""
    job = run("describe_host.py", container_entry_point=["python", "/opt/ml/code/describe_host.py"])
    assert job.has_succeeded, job
    seen = {host: job.json(f"data/{host}.json") for host in sorted(job.exit_codes)}
    assert {host: facts["model"] for host, facts in seen.items()} == {host: [host] for host in seen}
    assert sorted(job.model) == sorted(seen)
    assert {host: facts["channels"] for host, facts in seen.items()} == {
        FIRST_TRAINER: {},
        DATA_HOST: {"training": ["points.txt"]},
        SECOND_TRAINER: {},
    }
    types = {host: facts["config"]["resourceconfig"]["current_instance_type"] for host, facts in seen.items()}
    assert types == {FIRST_TRAINER: "ml.g5.xlarge", DATA_HOST: "ml.c5.xlarge", SECOND_TRAINER: "ml.g5.xlarge"}
