"""Mistakes in job files: each is reported with its line, the expected value and the nearest key."""

import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import Group, Job, read_job
from lightning_sm.submit.overrides import parse_overrides
from lightning_sm.submit.preflight import check

ROOT = Path(__file__).parents[3]
REGION = "eu-west-1"
GOOD = """\
image: 111122223333.dkr.ecr.eu-west-1.amazonaws.com/lightning-sm:latest
role: arn:aws:iam::111122223333:role/training
name: digits
groups:
  trainer:
    instance_type: ml.g5.xlarge
    count: 2
  data: {instance_type: ml.c6i.4xlarge}
channels:
  training:
    uri: s3://bucket/cifar10
    groups: [data]
hyperparameters:
  data.batch_size: 64
environment:
  NCCL_DEBUG: INFO
output: s3://bucket/output
checkpoints: s3://bucket/checkpoints
metrics: [val_acc]
max_run_s: 3600
spot: {max_wait_s: 7200}
"""
# Terms of jsonargparse, Python and PyYAML, which a job file's author does not know.
FOREIGN = re.compile(
    r"Traceback|jsonargparse|argparse|NoneType|<class|Namespace|Subclass|class path|Parser key|dataclass|"
    r"\bdict\b|\bstr\b|\bint\b|\bbool\b|\bfloat\b|Optional\[|Union\[|object at 0x|Error\(|unicode string|"
    r"block (?:end|mapping)|stream"
)


def problems_of(text, folder, options=()):
    """Return the problems that a dry run reports for a job file, without its folder's path."""
    path = folder / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        check(read_job(path, parse_overrides(options, Job)[0]), "cloud", REGION).report()
    except SubmitError as error:
        title, *lines = str(error).replace(f"{folder}/", "").split("\n")
        assert re.fullmatch(r"\d+ problems?; nothing was sent:", title)
        return lines
    return []


def test_the_good_file_has_no_problem(tmp_path):
    """A valid file has no problems, so each mistake below is the only one."""
    assert problems_of(GOOD, tmp_path) == []


# Columns: text to replace, its replacement, line of the only problem, and parts of the message.
MISTAKES = [
    # YAML
    (GOOD, "", None, ["job.yaml: the file is empty"]),
    (GOOD, "# all lines are comments\n", None, ["job.yaml: the file is empty"]),
    (GOOD, "- image\n", None, ["job.yaml: the file is a list; expected keys with values"]),
    (GOOD, "image\n", None, ["job.yaml: the file is text; expected keys with values"]),
    (
        "    instance_type: ml",
        "\tinstance_type: ml",
        6,
        ["a tab is where YAML needs a space; YAML indents with spaces"],
    ),
    ("name: digits", "name:\n\tdigits: x", 4, ["a tab is where YAML needs a space"]),
    ("name: digits", "name: digits\nname: letters", 4, ["name is given twice, first at job.yaml:3. Remove one."]),
    ("    count: 2", "    count: 2\n    count: 4", 8, ["groups.trainer.count is given twice, first at job.yaml:7"]),
    ("max_run_s: 3600", "max_run_s: 3600\ngroups: {}", 21, ["groups is given twice, first at job.yaml:4"]),
    ("[val_acc]", "[val_acc", 19, ["[ is not closed, or a comma is missing"]),
    ("{max_wait_s: 7200}", "{max_wait_s: 7200", 21, ["{ is not closed, or a comma is missing"]),
    ("name: digits", "name: 'digits", 3, ["' is not closed"]),
    ("name: digits", "name: digits: two", 3, ["Quote a value that contains ': '"]),
    ("name: digits", "name digits", 4, ["check its indentation"]),
    ("name: digits", "  name: digits", 3, ["check its indentation"]),
    ("name: digits", "name: @digits", 3, ["Quote a value that", "begins with @"]),
    ("name: digits", "name: *digits", 3, ["Quote a value that", "begins with @ or *"]),
    ("name: digits", "name: !digits x", 3, ["name: the value does not fit its YAML type. Quote it"]),
    ("name: digits", "name: digits\n---\nname: letters", 4, ["a second document begins here"]),
    ("name: digits", "name: d\x07", 3, ["a character that YAML does not allow"]),
    ("name: digits", "name: digits\n1: x", 4, ["a name is a number; expected text. Quote it."]),
    ("name: digits", "name: digits\n<<: {a: x}", 4, ["<< does not merge keys in a job file. Repeat them here."]),
    ("name: digits", "name: digits\n[a]: x", 4, ["a name is a list; expected text. Quote it."]),
    ("name: digits", "request: &a {Tags: *a}", None, ["an anchor (&) contains its own alias (*)"]),
    ("name: digits", f"request: {'[' * 3000}", None, ["values are nested too deeply"]),
    # keys
    (GOOD[: GOOD.index("\n") + 1], "", None, ["job.yaml: image is missing, as in image: 1111"]),
    (GOOD[GOOD.index("groups") : GOOD.index("channels")], "", None, ["job.yaml: groups is missing, as in groups: {"]),
    ("instance_type: ml.c6i.4xlarge", "count: 1", 8, ["groups.data.instance_type is missing"]),
    ("    uri: s3://bucket/cifar10\n", "", 10, ["channels.training.uri is missing"]),
    ("image:", "imagee:", 1, ["imagee is not a key of a job file. Did you mean image, as in image: 1111"]),
    ("image:", "image_uri:", 1, ["image_uri is not a key of a job file. Did you mean image, as in image: 1111"]),
    ("max_run_s:", "max_run:", 20, ["max_run is not a key of a job file. Did you mean max_run_s"]),
    ("max_run_s:", "MaxRuntimeInSeconds:", 20, ["Did you mean max_run_s, as in max_run_s: 3600?"]),
    ("    count: 2", "    instance_count: 2", 7, ["groups.trainer has no key instance_count. Did you mean count, as"]),
    ("max_wait_s", "max_wait", 21, ["spot has no key max_wait. Did you mean max_wait_s, as in max_wait_s: 7200?"]),
    (
        "name: digits",
        "instance_type: ml.g5.xlarge",
        3,
        ["Did you mean groups.NAME.instance_type, as in groups: {trainer: {instance_type:"],
    ),
    ("name: digits", "instance_count: 2", 3, ["Did you mean groups.NAME.count, as in groups: {trainer"]),
    ("name: digits", "volume_size: 100", 3, ["Did you mean volume_gb, as in volume_gb: 100?"]),
    ("name: digits", "use_spot_instances: true", 3, ["Did you mean spot, as in spot: {max_wait_s: 7200}?"]),
    ("name: digits", "max_wait: 7200", 3, ["Did you mean spot.max_wait_s, as in spot: {max_wait_s:"]),
    ("name: digits", "subnets: [subnet-1]", 3, ["Did you mean request, as in request: {VpcConfig: {Subnets: [subnet"]),
    ("name: digits", "test: {uri: s3://bucket/test}", 3, ["test is not a key of a job file."]),
    ("name: digits", "eval:\n  instance_type: ml.g5.xlarge", 3, ["eval is not a key of a job file."]),
    ("name: digits", "entry_point: train.py", 3, ["Did you mean script, as in script: train.py?"]),
    (
        GOOD[GOOD.index("groups") : GOOD.index("channels")],
        "groups: {instance_type: ml.g5.xlarge}\n",
        4,
        ["groups.instance_type is 'ml.g5.xlarge'; expected keys with values. For example, groups: {trainer: {"],
    ),
    # values
    ("count: 2", "count: two", 7, ["groups.trainer.count is 'two'; expected a whole number. For example, count: 2."]),
    ("count: 2", "count: 2.5", 7, ["groups.trainer.count is 2.5; expected a whole number"]),
    ("count: 2", "count: '2'", 7, ["groups.trainer.count is '2'; expected a whole number. For example, count: 2."]),
    ("count: 2", "count: 0", 7, ["groups.trainer.count is 0; expected at least 1"]),
    ("count: 2", "count: true", 7, ["groups.trainer.count is true; expected a whole number"]),
    (
        "max_run_s: 3600",
        "max_run_s: 1h",
        20,
        ["max_run_s is '1h'; expected a whole number of seconds. For example, max_run_s: 3600"],
    ),
    ("max_run_s: 3600", "max_run_s: 24:00", 20, ["max_run_s is '24:00'; expected a whole number of seconds"]),
    ("max_run_s: 3600", "max_run_s: 0777", 20, ["max_run_s is '0777'; expected a whole number of seconds"]),
    (
        "spot: {max_wait_s: 7200}",
        "spot: true",
        21,
        ["spot is true; expected keys with values. For example, spot: {max_"],
    ),
    ("spot: {max_wait_s: 7200}", "spot: 7200", 21, ["spot is 7200; expected keys with values"]),
    (
        "NCCL_DEBUG: INFO",
        "OMP_NUM_THREADS: 4",
        16,
        ["OMP_NUM_THREADS is a number; expected text. Quote it: OMP_NUM_THREADS: '4'"],
    ),
    (
        "NCCL_DEBUG: INFO",
        "HYDRA_FULL_ERROR: yes",
        16,
        ["is true or false; expected text. Quote it: HYDRA_FULL_ERROR: 'yes'"],
    ),
    (
        "NCCL_DEBUG: INFO",
        "NCCL_DEBUG:",
        16,
        ["environment.NCCL_DEBUG is empty; expected text. Quote it: NCCL_DEBUG: ''."],
    ),
    (
        "  NCCL_DEBUG: INFO",
        "  - NCCL_DEBUG=INFO",
        15,
        ["environment is a list; expected names with values. For example"],
    ),
    (
        "  data.batch_size: 64",
        "  - --data.batch_size=64",
        13,
        ["hyperparameters is a list; expected names with values"],
    ),
    ("  data.batch_size: 64", "  64: 64", 14, ["hyperparameters: a name is a number; expected text. Quote it."]),
    ("name: digits", "name: 20261124", 3, ["name is a number; expected text. Quote it: name: '20261124'"]),
    ("name: digits", "name: [digits]", 3, ["name is a list; expected text"]),
    ("[val_acc]", "val_acc", 19, ["metrics is 'val_acc'; expected a list. For example, metrics: [val_acc]."]),
    ("[val_acc]", "[val_acc, 1]", 19, ["metrics.2 is a number; expected text. Quote it: '1'."]),
    ("[val_acc]", "[val_acc, {a: b}]", 19, ["metrics.2 is a mapping; expected text"]),
    (
        "groups: [data]",
        "groups: data",
        12,
        ["channels.training.groups is 'data'; expected a list. For example, groups: [data]."],
    ),
    ("groups: [data]", "mode: fast", 12, ["is 'fast'; expected File, FastFile or Pipe. Did you mean FastFile?"]),
    ("groups: [data]", "mode: file", 12, ["Did you mean File?"]),
    ("name: digits", "retries: 3", 3, ["retries is 3; expected keys with values. For example, retries: {max_tries: 5"]),
    (
        "name: digits",
        "retries: {first_pause_s: .inf}",
        3,
        ["retries.first_pause_s is .inf; expected a number of seconds"],
    ),
    ("name: digits", "retries: {first_pause_s: -1}", 3, ["retries.first_pause_s is -1; expected at least 0"]),
    ("name: digits", "prices: {data: -1.5}", 3, ["prices.data is -1.5; expected at least 0"]),
    ("name: digits", "volume_gb: 100 GB", 3, ["volume_gb is '100 GB'; expected a whole number of GB"]),
    (
        "  training:\n    uri: s3://bucket/cifar10\n    groups: [data]\n",
        "  training: s3://bucket/cifar10\n",
        10,
        ["channels.training is 's3://bucket/cifar10'; expected keys with values. For example", "uri: s3://bucket/"],
    ),
    # keys that contradict each other, or what the service takes
    ("max_wait_s: 7200", "max_wait_s: 60", 21, ["spot.max_wait_s is 60 and max_run_s is 3600"]),
    ("eu-west-1.amazonaws", "us-east-1.amazonaws", 1, ["image is in us-east-1, but the job runs in eu-west-1"]),
    ("image: 1111", "image: docker.io/1111", 1, ["SageMaker needs an image in Amazon ECR"]),
    ("s3://bucket/checkpoints", "s3://bucket/output/", 17, ["equal to checkpoints"]),
    (
        "s3://bucket/checkpoints",
        "s3://bucket",
        17,
        ["output is s3://bucket/output", "checkpoints (s3://bucket) or below it"],
    ),
    ("s3://bucket/output", "/folder", 17, ["output is '/folder'; expected s3://bucket/prefix"]),
    (
        GOOD[GOOD.index("  trainer") : GOOD.index("channels")],
        "  trainer: {instance_type: ml.c5.xlarge}\n  data: {instance_type: ml.g5.xlarge}\n",
        4,
        ["the data hosts (ml.g5.xlarge) have GPUs, and the trainers (ml.c5.xlarge) have none"],
    ),
    ("arn:aws:iam::111122223333:role/", "", 2, ["role is 'training'; expected an ARN"]),
    ("role: arn:aws:iam::111122223333:role/training\n", "", None, ["job.yaml: role is missing"]),
    (
        "name: digits",
        "name: my_digits",
        3,
        ["name is 'my_digits'; expected at most", "letters, digits and hyphens, with no hyphen at either end"],
    ),
    ("name: digits", "source_dir: .", 3, ["source_dir is set, but script is missing", "as in script: train.py"]),
    ("name: digits", "source_dir: src\nscript: a.py", 3, ["src', which is not a directory"]),
    ("groups: [data]", "groups: [dta]", 12, ["channels.training.groups names dta, but the job's groups are data, tr"]),
    (
        "NCCL_DEBUG: INFO",
        "LIGHTNING_SM_DATAGROUPS: x",
        16,
        ["nothing reads LIGHTNING_SM_DATAGROUPS. Did you mean LIGHT"],
    ),
    ("name: digits", "request: {RoleArn: a}", 3, ["request has RoleArn, which the key role sets. Use role."]),
    ("ml.g5.xlarge", "g5.xlarge", 6, ["groups.trainer.instance_type is 'g5.xlarge'", "Did you mean ml.g5.xlarge?"]),
    # secrets
    (
        "spot: {max_wait_s: 7200}",
        "tune: {objective: a, ranges: {api_key: {values: [hunter2, b]}}, direction: maximize}",
        21,
        ["tune.ranges.api_key looks like a secret", "not_secret: [api_key]"],
    ),
    (
        "NCCL_DEBUG: INFO",
        "WANDB_API_KEY: hunter2",
        16,
        ["environment.WANDB_API_KEY looks like a secret", "Secrets Manager"],
    ),
    (
        "NCCL_DEBUG: INFO",
        "DB: postgres://me:hunter2@host/a",
        16,
        ["environment.DB looks like a secret", "not_secret: [DB]"],
    ),
    (
        "data.batch_size: 64",
        "hub.token: hunter2",
        14,
        ["hyperparameters.hub.token looks like a secret", "not_secret: [hub.token]"],
    ),
    (
        "data.batch_size: 64",
        "logger: {a: 1, api_key: hunter2}",
        14,
        ["hyperparameters.logger.api_key looks like a secret"],
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "words"), MISTAKES)
def test_a_mistake_is_found_with_its_line(tmp_path, old, new, line, words):
    """The message is the only one and has the mistake's line, unless the mistake is missing text."""
    assert old in GOOD
    found = problems_of(GOOD.replace(old, new, 1), tmp_path)
    shown = "\n".join(found)
    for word in words:
        assert word in shown
    place = "job.yaml: " if line is None else f"job.yaml:{line}: "
    assert [one for one in found if not one.startswith(place)] == []
    assert len(found) == 1
    assert not FOREIGN.search(shown), shown
    assert "hunter2" not in shown


def test_all_mistakes_of_a_kind_are_reported_at_once(tmp_path):
    """All mistakes in keys and values are reported, in the file's order; once there are none, all broken rules."""
    text = (
        GOOD.replace("name: digits", "nam: digits")
        .replace("count: 2", "count: two")
        .replace("{max_wait_s: 7200}", "true")
    )
    assert [one.split(": ")[0] for one in problems_of(text, tmp_path)] == [f"job.yaml:{line}" for line in (3, 7, 21)]
    text = GOOD.replace("NCCL_DEBUG: INFO", "HF_TOKEN: hunter2").replace("bucket/output", "bucket/checkpoints/output")
    found = [one.split(": ")[0] for one in problems_of(text, tmp_path)]
    assert found == ["job.yaml:16", "job.yaml:17"]


def test_a_table_in_a_message_is_indented(tmp_path):
    """Tables in messages are indented, so that each problem begins a line, as in compilers' output."""
    text = GOOD.replace("  trainer:", "  data2:")
    first, *table = problems_of(text, tmp_path)
    assert first.startswith("job.yaml:4: groups: ")
    assert table
    assert all(line.startswith("    ") for line in table)


def test_a_value_that_cannot_be_read_has_no_consequences(tmp_path):
    """A value that cannot be read, such as a group or a time limit, causes no further problems."""
    for old, new, line in (
        ("    instance_type: ml.g5.xlarge", "    instance_type: 5", 6),
        ("max_run_s: 3600", "max_run_s: soon", 20),
        ("  data: {instance_type: ml.c6i.4xlarge}", "  data: ml.c6i.4xlarge", 8),
    ):
        (problem,) = problems_of(GOOD.replace(old, new), tmp_path)
        assert problem.startswith(f"job.yaml:{line}: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--groups.trainer.count=two"],
            "--groups.trainer.count: groups.trainer.count is 'two'; expected a whole number",
        ),
        (["--groups.trainr.count=4"], "groups.trainr.instance_type is missing, as in instance_type: ml.g5.xlarge. Did"),
        (["--groups.trainer.instance_count", "2"], "groups.trainer has no key instance_count. Did you mean count"),
        (["--image.uri=a"], "--image.uri: image is a mapping; expected text"),
        (["--spot=true"], "--spot: spot is true; expected keys with values"),
        (["--spot.max_wait_s=60"], "--spot.max_wait_s: spot.max_wait_s is 60 and max_run_s is 3600"),
        (["--groups.trainer={count: 1"], "--groups.trainer: the value is not YAML: { is not closed"),
        (["--hyperparameters.a=" + 3000 * "["], "--hyperparameters.a: values are nested too deeply"),
        (
            ["--channels.test={uri: s3://bucket/a, uri: s3://bucket/b}"],
            "--channels.test: channels.test.uri is given twice",
        ),
        (["--environment.HF_TOKEN=hunter2"], "--environment.HF_TOKEN: environment.HF_TOKEN looks like a secret"),
        (
            ["--hyperparameters.api_key=hunter2"],
            "--hyperparameters.api_key: hyperparameters.api_key looks like a secret",
        ),
        (["--output=s3://bucket/checkpoints"], "--output: output is s3://bucket/checkpoints, which is equal to"),
    ],
)
def test_a_mistake_in_an_option_is_found_with_the_option(tmp_path, options, words):
    """The message names the option instead of a line."""
    (problem,) = problems_of(GOOD, tmp_path, options)
    assert problem.startswith(f"{options[0].partition('=')[0]}: ")
    assert words in problem
    assert not FOREIGN.search(problem)
    assert "hunter2" not in problem


@pytest.mark.parametrize("mode", ["local", "cloud"])
def test_secrets_that_stay_here_or_are_none_are_allowed(tmp_path, mode):
    """Secrets are allowed in local mode, and if not_secret names them."""
    secrets = GOOD.replace("NCCL_DEBUG: INFO", "HF_TOKEN: a").replace("data.batch_size: 64", "hub: {api_key: a}")
    path = tmp_path / "job.yaml"
    path.write_text(secrets + "not_secret: [HF_TOKEN, hub.api_key]\n" if mode == "cloud" else secrets)
    assert [one for one in check(read_job(path), mode, REGION).problems if "secret" in one.text] == []


def test_what_equals_nothing_is_no_secret():
    """NaN, which does not equal itself, is not taken for a secret."""
    values = {"a": math.nan, "b": {"c": [math.nan]}}
    problems = check(Job("x", {"trainer": Group("ml.g5.xlarge")}, hyperparameters=values), "cloud").problems
    assert [one.key for one in problems if "secret" in one.text] == []


def test_secrets_of_the_config_file_are_found(tmp_path):
    """A secret in the config file is reported at the key that names the file."""
    (tmp_path / "a.yaml").write_text("trainer: {logger: {init_args: {api_key: hunter2}}}")
    (problem,) = problems_of(GOOD.replace("name: digits", "config: a.yaml"), tmp_path)
    assert problem.startswith("job.yaml:3: config.trainer.logger.init_args.api_key looks like a secret")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """A missing file, a folder and a file that is not text are errors that name the path."""
    with pytest.raises(SubmitError, match=r"nofile\.yaml: the file cannot be read: No such file"):
        read_job(tmp_path / "nofile.yaml")
    with pytest.raises(SubmitError, match="cannot be read: Is a directory"):
        read_job(tmp_path)
    assert problems_of(b"name: \xff\xfe", tmp_path) == ["job.yaml: the file is not UTF-8 text (byte 6)."]


FILES = [GOOD, (ROOT / "app" / "job.yaml").read_text(encoding="utf-8")]
SCALARS = ["", "null", "true", "no", "1", "-1", "1.5", "1e-3", ".nan", "0o7", "12:30", "2026-11-24", "text", "s3://b/c"]
SCALARS += [
    "[]",
    "{}",
    "[1, a]",
    "{a: b}",
    "{instance_type: ml.g5.xlarge}",
    "'",
    '"',
    "*a",
    "&a b",
    "!x y",
    "- a",
    "\t",
    "|",
    "? a",
]
MUTATIONS = {
    "delete": lambda lines, at, _: lines[:at] + lines[at + 1 :],
    "repeat": lambda lines, at, _: lines[: at + 1] + lines[at:],
    "indent": lambda lines, at, _: [*lines[:at], f"  {lines[at]}", *lines[at + 1 :]],
    "outdent": lambda lines, at, _: [*lines[:at], lines[at].strip(), *lines[at + 1 :]],
    "tab": lambda lines, at, _: [*lines[:at], "\t" + lines[at].strip(), *lines[at + 1 :]],
    "rename": lambda lines, at, _: [*lines[:at], lines[at].replace("a", "", 1), *lines[at + 1 :]],
    "retype": lambda lines, at, new: [*lines[:at], lines[at].partition(":")[0] + f": {new}", *lines[at + 1 :]],
    "insert": lambda lines, at, new: [*lines[:at], new, *lines[at:]],
    "truncate": lambda lines, at, _: [*lines[:at], lines[at][: len(lines[at]) // 2]],
}


@given(
    st.sampled_from(FILES),
    st.lists(
        st.tuples(st.sampled_from(sorted(MUTATIONS)), st.integers(0, 60), st.sampled_from(SCALARS)),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_change_of_a_file_leaves_a_job_or_messages(tmp_path, text, changes):
    """Any change results in a job or in messages without terms from the parser or Python."""
    lines = text.splitlines()
    for kind, at, new in changes:
        lines = MUTATIONS[kind](lines, at % len(lines), new) if lines else lines
    assert_job_or_messages("\n".join(lines), tmp_path)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 99)
    | st.floats()
    | st.sampled_from(["", "a", "s3://b/c", "File", "data"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "count", "uri", "min"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Job.__dataclass_fields__, "nonsense"]), TREES, max_size=6))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_values_of_keys_leave_a_job_or_messages(tmp_path, tree):
    """Values of any type result in a job or in messages."""
    assert_job_or_messages(yaml.safe_dump({**yaml.safe_load(GOOD), **tree}), tmp_path)


def assert_job_or_messages(text, folder):
    """Check that the text describes a well-typed job, or that its problems use the terms of job files."""
    found = problems_of(text, folder)
    assert all(re.match(r"job\.yaml(:\d+)?: \S|    ", one) for one in found), found
    assert not FOREIGN.search("\n".join(found)), found
    if not found:
        job = read_job(folder / "job.yaml")
        assert all(type(group.count) is int and type(group.instance_type) is str for group in job.groups.values())
        assert all(type(value) is str for value in job.environment.values())
        assert type(job.max_run_s) is int


def test_the_page_shows_what_is_said(tmp_path):
    """docs/submit.md shows the messages for a file with these mistakes."""
    text = (
        "image: 111122223333.dkr.ecr.eu-west-1.amazonaws.com/lightning-sm:latest\n"
        "role: arn:aws:iam::111122223333:role/training\n"
        "groups:\n"
        "  trainer: {instance_type: ml.g5.xlarge, instance_count: 2}\n"
        "  data: {instance_type: ml.c6i.4xlarge}\n"
        "channels:\n"
        "  training: {uri: s3://bucket/cifar10}\n"
        "environment:\n"
        "  OMP_NUM_THREADS: 4\n"
        "output: s3://bucket/output\n"
        "checkpoints: s3://bucket/checkpoints\n"
        "max_run_s: 1h\n"
        "spot: true\n"
    )
    shown = "\n".join(problems_of(text, tmp_path))
    page = (ROOT / "docs" / "submit.md").read_text(encoding="utf-8")
    assert f"error: 4 problems; nothing was sent:\n{shown}\n```" in page
