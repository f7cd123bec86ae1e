"""The command line of lightning-sm submit."""

import pytest

pytest.importorskip("botocore", reason="needs the SageMaker SDK (extra launch)")

from lightning_sm.errors import SubmitError
from lightning_sm.submit import command

pytestmark = pytest.mark.sdk2


@pytest.fixture
def job_file(tmp_path):
    """A small job file."""
    path = tmp_path / "job.yaml"
    path.write_text("image: x\ngroups:\n  trainer: {instance_type: ml.g5.xlarge}\n")
    return str(path)


def test_follow_is_a_way_to_wait(job_file):
    """So it contradicts --wait=false, before anything is checked."""
    with pytest.raises(SubmitError, match="--wait=false and --follow contradict each other"):
        command.main([job_file, "--cloud", "--follow", "--wait=false"])


def test_a_misspelled_option_is_answered_with_a_similar_one(job_file):
    """As in the file."""
    with pytest.raises(SubmitError, match="Did you mean checkpoints"):
        command.main([job_file, "--cloud", "--chekpoints=s3://bucket/c"])
