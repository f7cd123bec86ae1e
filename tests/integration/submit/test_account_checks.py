"""Checks of the account before a job is sent, with a fake service on this machine. Nothing is ever sent to AWS."""

from __future__ import annotations

import socket

import pytest

from lightning_sm.cloud.aws import Clients, new_session
from lightning_sm.errors import AWSError
from lightning_sm.submit.account_checks import check_account
from lightning_sm.submit.job_file import Group, InputChannel, Job, Spot
from tests.fakes.sagemaker_service import FakeService

TRUST = {
    "Statement": {
        "Effect": "Allow",
        "Principal": {"Service": ["ec2.amazonaws.com", "sagemaker.amazonaws.com"]},
        "Action": "sts:AssumeRole",
    }
}
QUOTAS = {
    "ml.p3.2xlarge for training job usage": 0.0,
    "ml.c5.xlarge for training job usage": 4.0,
    "ml.g5.xlarge for spot training job usage": 1.0,
    "ml.g5.xlarge for training job usage": 2.0,
    "ml.g5.xlarge for training warm pool usage": 1.0,
    "ml.c5.xlarge for training warm pool usage": 4.0,
}


def job(**changed):
    """A job for which this account has everything."""
    keys = {
        "image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/lightning-sm:1",
        "role": "arn:aws:iam::111122223333:role/training",
        "groups": {"trainer": Group("ml.g5.xlarge", 2), "data": Group("ml.c5.xlarge")},
        "output": "s3://bucket/output",
        "checkpoints": "s3://bucket/checkpoints",
        "channels": {"training": InputChannel("s3://bucket/data")},
    }
    return Job(**(keys | changed))


@pytest.fixture
def service(monkeypatch):
    """An account whose user may inspect everything."""
    with FakeService(role=TRUST, images=["1"], quotas=dict(QUOTAS)) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        yield service


def check(the_job):
    """Check the account; return the problems by key, and the warnings."""
    findings = check_account(Clients(new_session()), the_job, "us-east-1")
    return {problem.key: problem.text for problem in findings.problems}, findings.warnings


def test_an_account_that_has_everything_is_not_spoken_of(service):
    """A complete account causes no message, and the checks write and create nothing."""
    assert check(job()) == ({}, [])
    assert {line.split()[0] for line in service.seen} == {"POST", "HEAD"}
    assert set(service.operations) == {"DescribeImages", "ListServiceQuotas"}


@pytest.mark.parametrize(
    ("changed", "key", "words"),
    [
        ({"role": "arn:aws:iam::444455556666:role/training"}, "role", "role training is arn:aws:iam::111122223333:"),
        ({"role": "arn:aws:iam::111122223333:role/other"}, "role", "the account has no role other"),
        (
            {"role": "arn:aws:iam::111122223333:role/path/training"},
            "role",
            "role training is arn:aws:iam::111122223333:",
        ),
        ({"image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/a/b:1"}, "image", "not in ECR (RepositoryNotFound"),
        ({"image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/lightning-sm"}, "image", "not in ECR (ImageNotFound"),
        ({"output": "s3://nowhere/output"}, "output", "there is no bucket nowhere"),
        ({"channels": {"training": InputChannel("s3://abroad/data")}}, "channels.training", "is in eu-west-1, but"),
        ({"groups": {"trainer": Group("ml.g5.xlarge", 3)}}, "groups", "in us-east-1 is 2. Request an increase"),
        ({"spot": Spot(90000)}, "groups", '"ml.g5.xlarge for spot training job usage" in us-east-1 is 1.'),
    ],
)
def test_what_would_make_the_job_fail_is_a_problem(service, changed, key, words):
    """Each problem names the key to change."""
    service.buckets["/abroad"] = "eu-west-1"
    problems, _ = check(job(**changed))
    assert list(problems) == [key]
    assert words in problems[key]


def test_a_role_that_does_not_trust_the_service_is_a_problem(service):
    """A role that only another service can assume is a problem."""
    service.role = {"Statement": [TRUST["Statement"] | {"Principal": {"Service": "ec2.amazonaws.com"}}]}
    problems, _ = check(job())
    assert "does not let sagemaker.amazonaws.com assume it" in problems["role"]
    service.role["Statement"].append(TRUST["Statement"])
    assert check(job()) == ({}, [])


def test_what_may_not_be_looked_at_is_a_warning(service):
    """A check without permission causes a warning that names the permission: the job's role may have it."""
    service.role = service.images = service.quotas = None
    service.foreign.append("/bucket")
    problems, warnings = check(job())
    assert problems == {}
    assert warnings == [
        "role was not checked: you are not allowed to call iam:GetRole.",
        "image was not checked: you are not allowed to call ecr:DescribeImages.",
        *(
            f"{key}: the bucket bucket was not checked: you are not allowed to call s3:ListBucket."
            for key in ("channels.training", "output", "checkpoints")
        ),
        "the quota for the hosts was not checked: you are not allowed to call servicequotas:ListServiceQuotas.",
    ]


def test_what_only_may_fail_is_a_warning(service):
    """Output in another region, and a quota without a value in the account, cause warnings."""
    service.buckets["/abroad"] = "eu-west-1"
    del service.quotas["ml.c5.xlarge for training job usage"]
    problems, warnings = check(job(output="s3://abroad/output"))
    assert problems == {}
    assert [one for one in warnings if "the service may refuse that" in one]
    assert [one for one in warnings if "its default applies" in one]


def test_an_account_that_cannot_be_reached_is_a_warning(service, monkeypatch):
    """Services that cannot be reached from here cause warnings: the one that accepts the job may be reachable."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening: connections are refused
        for name in ("STS", "IAM", "ECR", "SERVICE_QUOTAS"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", f"http://127.0.0.1:{closed.getsockname()[1]}")
        problems, warnings = check(job())
    assert problems == {}
    assert len(warnings) == 4
    assert all("was not checked: Could not connect" in one for one in warnings), warnings


def test_a_session_that_is_over_ends_it(service, monkeypatch, tmp_path):
    """An expired session, such as one of IAM Identity Center, ends the checks and names the command that renews it."""
    (tmp_path / "config").write_text(
        "[profile sso]\nsso_start_url = https://example.com\nsso_region = us-east-1\nsso_account_id = 111122223333\n"
        "sso_role_name = role\nregion = us-east-1\n"
    )
    for name, value in {"CONFIG_FILE": str(tmp_path / "config"), "PROFILE": "sso"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # where tokens are kept
    with pytest.raises(AWSError, match=r"renew them \(aws sso login\)"):
        check(job())
    assert service.operations == []


def test_credentials_that_aws_does_not_accept_end_it(service):
    """Rejected credentials end the checks before any other call."""
    service.has_valid_key = False
    with pytest.raises(AWSError, match="does not accept your credentials"):
        check(job())
    assert service.operations == []
