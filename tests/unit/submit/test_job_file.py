"""Job files: keys, types, and options that win over the file."""

from pathlib import Path

import pytest
import yaml

from lightning_sm.errors import SubmitError
from lightning_sm.submit.dataclass_fields import all_keys, keys_of
from lightning_sm.submit.job_file import Group, InputChannel, Job, Range, Spot, Tune
from lightning_sm.submit.job_file import read_job as read
from lightning_sm.submit.overrides import Override, parse_overrides

ROOT = Path(__file__).parents[3]
SMALL = "image: x\ngroups:\n  trainer: {instance_type: ml.g5.xlarge, count: 2}\n"


def read_job(path, words=()):
    """Return the job described by a file and options."""
    return read(path, parse_overrides(words, Job)[0])


@pytest.fixture
def job_file(tmp_path):
    """Return a function that writes a job file and returns its path."""

    def write(text):
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def test_a_small_file_is_enough(job_file):
    """Image and groups are the only required keys."""
    job = read_job(job_file(SMALL))
    assert job == Job(image="x", groups={"trainer": Group("ml.g5.xlarge", 2)})
    assert (job.name, job.max_run_s, job.volume_gb, job.retries.max_tries) == ("lightning", 86400, 30, 5)


def test_options_win_over_the_file_and_leave_the_rest(job_file):
    """Options change single values in a group, a channel or a section."""
    text = SMALL + "channels:\n  training: {uri: s3://bucket/a, groups: [trainer]}\nspot: {max_wait_s: 5}\n"
    job = read_job(
        job_file(text),
        [
            "--groups.trainer.count=4",
            "--groups.data.instance_type=ml.c5.xlarge",
            "--channels.training.mode=FastFile",
            "--spot.max_wait_s=99",
            "--environment.NAME=value",
            "--retries.max_tries=1",
        ],
    )
    assert job.groups == {"trainer": Group("ml.g5.xlarge", 4), "data": Group("ml.c5.xlarge", 1)}
    assert job.channels == {"training": InputChannel("s3://bucket/a", ["trainer"], "FastFile")}
    assert (job.spot, job.environment, job.retries.max_tries) == (Spot(99), {"NAME": "value"}, 1)


@pytest.mark.parametrize(
    ("stated", "options", "expected"),
    [
        ("{}", ["a.x=1", "a.y=[2]", "b=1e-3"], {"a.x": 1, "a.y": [2], "b": 0.001}),
        ("{a.x: 1, b: 2}", ["a.x=3"], {"b": 2, "a.x": 3}),
        ("{a: {x: 1, y: 2}}", ["a.x=3"], {"a": {"x": 1, "y": 2}, "a.x": 3}),
        ("{a.x: 1, a.y: 2, ab: 3}", ["a={y: 4}"], {"ab": 3, "a": {"y": 4}}),
    ],
)
@pytest.mark.parametrize("is_one_word", [True, False])
def test_hyperparameters_of_options_win_one_by_one(job_file, stated, options, expected, is_one_word):
    """Options replace single hyperparameters: dots belong to their names, and their values are typed."""
    pairs = [f"--hyperparameters.{option}".split("=", 1) for option in options]
    words = ["=".join(pair) for pair in pairs] if is_one_word else [word for pair in pairs for word in pair]
    job = read_job(job_file(SMALL + f"hyperparameters: {stated}\n"), words)
    assert list(job.hyperparameters.items()) == list(expected.items())


@pytest.mark.parametrize("key", ["channels", "hyperparameters", "environment", "metrics", "retries", "tags", "name"])
def test_a_key_without_a_value_is_as_good_as_none(job_file, key):
    """A key without a value counts as missing, such as one above commented-out lines."""
    assert read_job(job_file(SMALL + f"{key}:\n  # nothing\n")) == read_job(job_file(SMALL))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL + "imagee: y\n", ["imagee", "Did you mean image, as in"]),
        (SMALL + "max_run_s: soon\n", ["max_run_s", "soon"]),
        (SMALL + "spot: {max_wait: 5}\n", ["spot", "max_wait", "Did you mean max_wait_s"]),
        (SMALL + "channels: {a: {uri: s3://b/c, mod: Fast}}\n", ["mod", "Did you mean mode, as in"]),
        (SMALL + "retries: {max_trys: 3}\n", ["max_trys", "Did you mean max_tries, as in"]),
        (SMALL + "channels: {a: {uri: s3://b/c, mode: Fast}}\n", ["channels", "mode", "Fast"]),
        (SMALL.replace("count: 2", "count: two"), ["groups", "count", "two"]),
        ("image: x\n", ["groups"]),
        (SMALL + "hyperparameters: {1: 2}\n", ["hyperparameters", "a number", "Quote"]),
        (SMALL + "channels: {1: {uri: s3://b/c}}\n", ["channels", "a number"]),
        ("image: [x\n", ["job.yaml:1: [ is not closed"]),
    ],
)
def test_what_is_wrong_is_named(job_file, text, words):
    """Unknown keys, wrong types, missing keys and broken YAML are errors that name the file, the key and the value."""
    path = job_file(text)
    with pytest.raises(SubmitError) as caught:
        read_job(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["environment: {DB_PASSWORD: 314159}", "environment: {A: {DB_PASSWORD: '314159'}}"])
def test_a_wrong_value_that_may_be_a_secret_is_not_quoted(job_file, text):
    """For environment, the error names the key and the type but not the value."""
    with pytest.raises(SubmitError, match="environment") as caught:
        read_job(job_file(SMALL + text))
    assert "expected text" in str(caught.value)
    assert "314159" not in str(caught.value)


def test_an_option_without_its_value_is_named(job_file):
    """A trailing hyperparameter without a value is an error that names it."""
    with pytest.raises(SubmitError, match=r"--hyperparameters\.a\.b: expected a value"):
        read_job(job_file(SMALL), ["--hyperparameters.a.b"])


def test_members_of_the_request_are_changed_one_by_one(job_file):
    """Members of ``request`` have no dots in their names, so an option can address any depth."""
    text = SMALL + "request: {VpcConfig: {Subnets: [a], SecurityGroupIds: [b]}, RemoteDebugConfig: {}}\n"
    options = ["--request.VpcConfig.Subnets=[c]", "--request.StoppingCondition.MaxPendingTimeInSeconds=7200"]
    assert read_job(job_file(text), options).request == {
        "VpcConfig": {"SecurityGroupIds": ["b"], "Subnets": ["c"]},
        "RemoteDebugConfig": {},
        "StoppingCondition": {"MaxPendingTimeInSeconds": 7200},
    }


def test_null_removes_what_the_file_says(job_file):
    """Null removes a key, an entry or a member; only for hyperparameters, it is a value."""
    text = (
        SMALL
        + "environment: {A: a, B: b}\nrequest: {VpcConfig: {}, A: b}\nhyperparameters: {a: 1}\nspot: {max_wait_s: 5}\n"
    )
    removed = ["spot", "environment.A", "request.VpcConfig", "hyperparameters.a"]
    job = read_job(job_file(text), [f"--{key}=null" for key in removed])
    assert (job.spot, job.environment, job.request, job.hyperparameters) == (None, {"B": "b"}, {"A": "b"}, {"a": None})


def test_relative_paths_start_from_the_file(job_file, tmp_path, monkeypatch):
    """Relative paths start from the job file's folder, not from the working directory; absolute paths are kept."""
    monkeypatch.chdir("/")
    job = read_job(job_file(SMALL + "config: a/b.yaml\nsource_dir: src\n"))
    assert (job.config, job.source_dir) == (str(tmp_path / "a" / "b.yaml"), str(tmp_path / "src"))
    assert read_job(job_file(SMALL + "config: /a/b.yaml\n")).config == "/a/b.yaml"


def test_ranges_of_a_tuning_job_keep_their_numbers(job_file):
    """Whole numbers stay integers, since these make an integer range; listed values keep their types."""
    ranges = "{a: {min: 1, max: 3}, b: {min: 1.0, max: 3}, c: {min: 1e-4, max: 0.1}, d: {values: [x, 1, 1.5, null]}}"
    job = read_job(job_file(SMALL + f"tune: {{objective: val_acc, direction: maximize, ranges: {ranges}}}\n"))
    assert job.tune == Tune(
        "val_acc",
        {"a": Range(1, 3), "b": Range(1.0, 3), "c": Range(1e-4, 0.1), "d": Range(values=["x", 1, 1.5, None])},
        "maximize",
    )
    assert [type(limit) for one in (job.tune.ranges["a"], job.tune.ranges["b"]) for limit in (one.min, one.max)] == [
        int,
        int,
        float,
        int,
    ]


def test_the_example_can_be_read():
    """The job file in app/ can be read, and its config file exists."""
    job = read_job(ROOT / "app" / "job.yaml")
    assert set(job.groups) == {"trainer", "data"}
    assert Path(job.config).is_file()


def test_examples_of_keys_are_valid():
    """The example for each key, used in messages and in the reference, can be read."""
    for path in all_keys(Job):
        top = keys_of(Job)[path.parts[0]]
        for field in (top, path.field):
            value = yaml.safe_load(field.about.example)
            assert value is not None, field.name
        needed = [("image", "x"), ("groups.NAME.instance_type", "ml.g5.xlarge"), ("channels.NAME.uri", "s3://bucket/a")]
        needed += [("tune", keys_of(Job)["tune"].about.example), ("spot.max_wait_s", "7200")]
        example = (".".join(path.parts), path.field.about.example)
        read(None, [Override(key, text, key) for key, text in (*needed, example)])
