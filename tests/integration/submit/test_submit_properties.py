"""Pre-flight checks against botocore's validation, for any job."""

import boto3
import pytest
from botocore.session import get_session
from botocore.validate import ParamValidator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sm.errors import SubmitError
from lightning_sm.submit import submit
from lightning_sm.submit.job_file import Group, InputChannel, Job, Spot

WORDS = st.sampled_from(["a", "data", "trainer", "a_b", "", " ", "x" * 70, "ä", "1-", "a\nb", "a=b", "-a"])
TEXTS = st.one_of(WORDS, st.text(max_size=5))
URIS = st.sampled_from(
    ["s3://bucket/a", "s3://bucket", "s3://", "bucket", "", "file:///a", "s3://bucket/" + "x" * 1100]
)
TYPES = st.sampled_from(["ml.g5.xlarge", "ml.c5.xlarge", "ml.p4d.24xlarge", "ml.g5.xlarg", "local", ""])
COUNTS = st.sampled_from([-1, 0, 1, 2, 30, 31, 21600, 21601, 86400, 10**7])
FITTING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.just("x" * 2498))
VALUES = FITTING | st.just("x" * 2499)


REQUESTED = st.sampled_from(["Subnets", "SecurityGroupIds", "MlflowResourceArn", "InstancePreferences", "Key"])


def mappings(values, max_size=3):
    """Generate a few names with values, and sometimes too many."""
    few = st.dictionaries(TEXTS, values, max_size=max_size)
    return st.one_of(few, values.map(lambda value: {f"k{index}": value for index in range(130)}))


JOBS = st.builds(
    Job,
    image=st.one_of(st.just("111122223333.dkr.ecr.us-east-1.amazonaws.com/a:b"), TEXTS),
    groups=st.dictionaries(WORDS, st.builds(Group, TYPES, COUNTS), max_size=6),
    role=st.one_of(st.none(), st.just("arn:aws:iam::111122223333:role/a"), TEXTS),
    name=TEXTS,
    channels=mappings(st.builds(InputChannel, URIS, groups=st.none() | st.lists(WORDS, max_size=2))),
    hyperparameters=mappings(VALUES),
    environment=mappings(TEXTS | st.just("x" * 600)),
    output=st.none() | URIS,
    checkpoints=st.none() | URIS,
    metrics=st.lists(TEXTS, max_size=3),
    max_run_s=COUNTS,
    spot=st.none() | st.builds(Spot, COUNTS),
    max_restarts=COUNTS,
    volume_gb=COUNTS,
    tags=mappings(TEXTS),
    request=st.dictionaries(
        st.sampled_from(
            ["VpcConfig", "MlflowConfig", "ResourceConfig", "Tags", "RetryStrategy", "RoleArn", "Nonsense"]
        ),
        st.recursive(
            VALUES,
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(REQUESTED, inner, max_size=2),
            max_leaves=4,
        ),
        max_size=2,
    ),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Use one session for all jobs."""
    session = boto3.Session(region_name="us-east-1")
    monkeypatch.setattr(submit, "new_session", lambda *_, **__: session)


@pytest.mark.proof
@given(JOBS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_job_is_refused_with_reasons_or_fits_the_service(job):
    """Every job is refused with SubmitError or accepted by botocore; no other exception is raised."""
    try:
        request = submit.dry_run(job)
    except SubmitError:
        return
    shape = get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    assert not ParamValidator().validate(request, shape).has_errors()
    assert len(request.get("HyperParameters", {})) <= 100
    assert all(len(value) <= 2500 for value in request.get("HyperParameters", {}).values())
    assert request["RoleArn"] == job.role


@given(
    st.builds(
        Job,
        image=st.just("111122223333.dkr.ecr.us-east-1.amazonaws.com/a:b"),
        groups=st.dictionaries(
            st.from_regex(r"[a-c][A-Za-z0-9]{0,8}", fullmatch=True),
            st.builds(Group, st.just("ml.g5.xlarge"), st.integers(1, 9)),
            min_size=1,
            max_size=5,
        ),
        role=st.just("arn:aws:iam::111122223333:role/a"),
        name=st.from_regex(r"[a-z]{1,39}", fullmatch=True),
        output=st.just("s3://bucket/output"),
        hyperparameters=st.dictionaries(st.from_regex(r"[a-z.]{1,20}", fullmatch=True), FITTING, max_size=9),
        environment=st.dictionaries(st.from_regex(r"[A-Z_]{1,20}", fullmatch=True), st.text(max_size=512), max_size=3),
        metrics=st.lists(st.from_regex(r"[a-z_/]{1,20}", fullmatch=True), unique=True, max_size=40),
        max_run_s=st.integers(1, 28 * 86400),
        max_restarts=st.integers(0, 1000),
        request=st.fixed_dictionaries(
            {}, optional={"RetryStrategy": st.fixed_dictionaries({"MaximumRetryAttempts": st.integers(1, 30)})}
        ),
    )
)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_a_job_within_the_limits_is_not_refused(job):
    """Pre-flight accepts every job that the service allows."""
    request = submit.dry_run(job)
    assert request["AlgorithmSpecification"]["TrainingImage"] == job.image
