"""The limits in the service's API model, tested at their boundaries."""

import copy

import pytest
from botocore.validate import ParamValidator

from lightning_sm.submit import request_limits

REQUEST = {
    "TrainingJobName": "job-1",
    "RoleArn": "arn:aws:iam::111122223333:role/training",
    "HyperParameters": {"a": "1"},
    "AlgorithmSpecification": {
        "TrainingImage": "image",
        "TrainingInputMode": "File",
        "MetricDefinitions": [{"Name": "a", "Regex": "a=(.*)"}],
    },
    "InputDataConfig": [
        {
            "ChannelName": "training",
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/a"}},
        }
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/b"},
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "Environment": {"A": "1"},
    "RetryStrategy": {"MaximumRetryAttempts": 30},
    "Tags": [{"Key": "a b", "Value": "ä/c"}],
}


def with_change(path, value):
    """Return the request with one value changed; the path has keys and indices."""
    request = copy.deepcopy(REQUEST)
    node = request
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return request


def test_a_good_request_has_no_problems():
    """A valid request has no problems."""
    assert request_limits.request_problems(REQUEST) == []


@pytest.mark.parametrize(
    ("path", "good", "bad", "words"),
    [
        (["HyperParameters"], {f"k{i}": "1" for i in range(100)}, {f"k{i}": "1" for i in range(101)}, "101 entries"),
        (["HyperParameters"], {"k" * 256: "1"}, {"k" * 257: "1"}, "257 characters"),
        (["HyperParameters", "a"], "x" * 2500, "x" * 2501, "allows 2500"),
        (["HyperParameters", "a"], "a b", "a\nb", "does not match"),
        (["Environment"], {f"K{i}": "1" for i in range(100)}, {f"K{i}": "1" for i in range(101)}, "allows 100"),
        (["Environment", "A"], "x" * 512, "x" * 513, "environment: "),
        (
            ["Environment"],
            {"_a9": "1"},
            {"9a": "1"},
            "environment: Environment['9a'] (name) is '9a', which does not match",
        ),
        (["RetryStrategy", "MaximumRetryAttempts"], 1, 31, "request: RetryStrategy"),
        (["ResourceConfig", "KeepAlivePeriodInSeconds"], 21600, 21601, "request: ResourceConfig.Keep"),
        (["ResourceConfig", "InstanceType"], "ml.p5.48xlarge", "ml.g5.xlarg", "ml.g5.xlarge"),
        (["ResourceConfig", "InstanceType"], "ml.g5.xlarge", "g5.xlarge", "Did you mean ml.g5.xlarge?"),
        (["ResourceConfig", "InstanceCount"], 1, -1, "InstanceCount"),
        (["ResourceConfig", "InstanceCount"], 1, "2", "InstanceCount"),
        (["TrainingJobName"], "a" * 63, "a" * 64, "name: "),
        (["TrainingJobName"], "a-b", "a_b", "does not match"),
        (["RoleArn"], "arn:aws-cn:iam::111122223333:role/a/b", "role/training-of-models", "role: "),
        (["OutputDataConfig", "S3OutputPath"], "s3://b", "/folder/of/mine", "output: "),
        (["Tags", 0, "Key"], "x" * 128, "x" * 129, "tags: "),
        (["Tags", 0, "Key"], "a.b", "a#b", "tags: "),
        (["StoppingCondition", "MaxRuntimeInSeconds"], 1, 0, "MaxRuntimeInSeconds"),
        (["Nonsense"], None, 1, "Nonsense"),
    ],
)
def test_every_limit_has_an_edge(path, good, bad, words):
    """The largest allowed value has no problem; the next value has one, which names the place or the key."""
    if good is not None:
        assert request_limits.request_problems(with_change(path, good)) == []
    problems = request_limits.request_problems(with_change(path, bad))
    assert problems
    assert words in problems[0].text


@pytest.mark.parametrize(
    ("path", "entry", "maximum"),
    [
        (["AlgorithmSpecification", "MetricDefinitions"], {"Name": "a", "Regex": "r" * 500}, 40),
        (["InputDataConfig"], REQUEST["InputDataConfig"][0], 20),
        (
            ["ResourceConfig", "InstanceGroups"],
            {"InstanceGroupName": "g", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
            5,
        ),
    ],
)
def test_lists_have_an_edge(path, entry, maximum):
    """40 metrics of 500 characters, 20 channels or 5 groups are allowed; one more is a problem."""
    assert request_limits.request_problems(with_change(path, [entry] * maximum)) == []
    (problem,) = request_limits.request_problems(with_change(path, [entry] * (maximum + 1)))
    assert f"{maximum + 1} entries; the service allows {maximum}" in problem.text


@pytest.mark.parametrize(
    ("path", "key", "words"),
    [
        (["InfraCheckConfig2"], "request", "InfraCheckConfig2 is not known"),
        (["ResourceConfig", "InstanceWishes"], "request", "ResourceConfig.InstanceWishes is not known"),
        (["InputDataConfig", 0, "Wish"], "channels", "InputDataConfig[0].Wish is not known"),
    ],
)
def test_a_setting_that_an_older_botocore_does_not_know_is_a_problem(path, key, words):
    """The problem names the key that requests the setting and the package to upgrade."""
    (problem,) = request_limits.request_problems(with_change(path, True))
    assert problem.key.partition(".")[0] == key
    assert words in problem.text
    assert "pip install --upgrade boto3" in problem.text


def test_all_problems_are_found_at_once():
    """Violations of types, minima, maxima and patterns are all reported at once."""
    request = {
        **REQUEST,
        "TrainingJobName": "_",
        "Environment": {"a-b": "x" * 513},
        "RoleArn": 7,
        "RetryStrategy": {"MaximumRetryAttempts": 0},
    }
    assert len(request_limits.request_problems(request)) == 5


def test_what_botocore_refuses_is_refused():
    """Wrong types, values below minima and missing members are problems, as they are for botocore."""
    wrong = [(["RoleArn"], 1), (["Tags"], "a"), (["HyperParameters"], {"a": 1}), (["InputDataConfig"], [])]
    for path, value in [*wrong, (["StoppingCondition"], None), (["OutputDataConfig"], {})]:
        request = with_change(path, value)
        assert ParamValidator().validate(request, request_limits._input_shape()).has_errors()
        assert request_limits.request_problems(request), path


def _patterns(shape, seen):
    if shape.name in seen:
        return
    seen.add(shape.name)
    if "pattern" in shape.metadata:
        yield shape.metadata["pattern"]
    children = [*getattr(shape, "members", {}).values()] if shape.type_name == "structure" else []
    children += [shape.member] if shape.type_name == "list" else []
    children += [shape.key, shape.value] if shape.type_name == "map" else []
    for child in children:
        yield from _patterns(child, seen)


def test_every_pattern_of_the_model_can_be_read():
    """The model's patterns are Java's; an unsupported character class would break the check of a valid job."""
    patterns = list(_patterns(request_limits._input_shape(), set()))
    assert len(patterns) > 40
    for pattern in patterns:
        request_limits.re.compile(request_limits._pattern(pattern))
