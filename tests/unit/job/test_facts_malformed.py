"""Malformed job sources raise errors that name the source, the field and its value."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sm.errors import JobConfigError
from tests.fakes.job_folder import SERVICE, TWO_GROUPS, TYPES, read, resource_config, write_job

# ---- files and variables


def broken(**changes: object) -> dict[str, object]:
    """Return the file of a heterogeneous job with some fields changed."""
    return {**resource_config(TWO_GROUPS, "algo-1", instance_types=TYPES), **changes}


def group(name: object, hosts: object, **others: object) -> dict[str, object]:
    """Return one entry of instance_groups."""
    return {"instance_group_name": name, "hosts": hosts, **others}


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (broken(current_host="algo-9"), r"current_host is 'algo-9', not one of \['algo-1', "),
        (broken(current_host=None), r"Expected `str`, got `null` - at `\$\.current_host`"),
        (broken(current_host=1), r"Expected `str`, got `int` - at `\$\.current_host`"),
        (broken(current_host=""), r"Expected `str` of length >= 1 - at `\$\.current_host`"),
        (broken(hosts=None), r"Expected `array`, got `null` - at `\$\.hosts`"),
        (broken(hosts=[]), r"Expected `array` of length >= 1 - at `\$\.hosts`"),
        (broken(hosts="algo-1"), r"Expected `array`, got `str` - at `\$\.hosts`"),
        (broken(hosts=["algo-1", 2]), r"Expected `str`, got `int` - at `\$\.hosts\[1\]`"),
        (broken(hosts=["algo-1", ""]), r"Expected `str` of length >= 1 - at `\$\.hosts\[1\]`"),
        (broken(hosts=["algo-1", "algo-1"]), r"each of the hosts \['algo-1', 'algo-1'\] once"),
        (broken(hosts=["algo-1", "algo-1"], instance_groups=[]), r"each of the hosts \['algo-1', 'algo-1'\] once"),
        (broken(network_interface_name=7), r"got `int` - at `\$\.network_interface_name`"),
        (broken(instance_groups={}), r"got `object` - at `\$\.instance_groups`"),
        (broken(instance_groups=[["x"]]), r"Expected `object`, got `array` - at `\$\.instance_groups\[0\]`"),
        (broken(instance_groups=[group(None, ["algo-1"])]), r"at `\$\.instance_groups\[0\]\.instance_group_name`"),
        (
            broken(instance_groups=[group("a", ["algo-1"]), group("a", ["algo-2", "algo-3"])]),
            r"the groups \['a', 'a'\] .*; expected distinct names",
        ),
        (
            broken(instance_groups=[group("a", ["algo-1"]), group("b", [])]),
            r"of length >= 1 - at `\$\.instance_groups\[1\]\.hosts`",
        ),
        (
            broken(instance_groups=[group("a", ["algo-1", "algo-9"])]),
            r"the groups \['a'\] have the hosts \['algo-1', 'algo-9'\]; expected .* 'algo-3'\] once",
        ),
        (
            broken(instance_groups=[group("a", ["algo-1", "algo-2"]), group("b", ["algo-3", "algo-2"])]),
            r"the groups \['a', 'b'\] have the hosts \['algo-1', 'algo-2', 'algo-3', 'algo-2'\]",
        ),
        (
            broken(instance_groups=[group("a", ["algo-1"], instance_type=5)]),
            r"got `int` - at `\$\.instance_groups\[0\]\.instance_type`",
        ),
        ([1], r"Expected `object`, got `array`"),
        ("{not json", r"not valid JSON \("),
        ("", r"not valid JSON \("),
        (b"\xff\xfe", r"cannot be read"),
        ("9" * 5000, r"not valid JSON"),
        ("[" * 200_000, r"not valid JSON"),
    ],
)
def test_malformed_resource_file_is_an_error_with_file_field_and_value(tmp_path, resources, message):
    """A malformed file raises an error that names the file and the field, and never falls back to a default."""
    file = re.escape(str(tmp_path / "input/config/resourceconfig.json"))
    with pytest.raises(JobConfigError, match=f"(?s)^{file}.*{message}"):
        read(write_job(tmp_path, resources))


@pytest.mark.parametrize(
    "name",
    [
        "resourceconfig.json",
        "inputdataconfig.json",
        "hyperparameters.json",
        "checkpointconfig.json",
        "tensorboardoutputconfig.json",
    ],
)
def test_file_that_cannot_be_read_is_an_error(tmp_path, name):
    """A folder in place of a file is an error, unlike a missing file."""
    write_job(tmp_path, None if name == "resourceconfig.json" else SERVICE)
    (tmp_path / "input/config" / name).mkdir()
    with pytest.raises(JobConfigError, match=f"{re.escape(name)}: cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"channels": {"train": "File"}}, r"inputdataconfig\.json: Expected `object`, got `str`"),
        ({"channels": {"train": {"TrainingInputMode": 1}}}, r"got `int` - at `\$\[\.\.\.\]\.TrainingInputMode`"),
        ({"channels": []}, r"inputdataconfig\.json: Expected `object`"),
        ({"hyperparameters": "[]"}, r"hyperparameters\.json: Expected `object`"),
        ({"hyperparameters": "{"}, r"hyperparameters\.json: not valid JSON"),
        ({"checkpoint": {"LocalPath": 1}}, r"checkpointconfig\.json: .* got `int` - at `\$\.LocalPath`"),
        ({"checkpoint": {"S3Uri": []}}, r"checkpointconfig\.json: .* got `array` - at `\$\.S3Uri`"),
        ({"tensorboard": {"LocalPath": {}}}, r"tensorboardoutputconfig\.json: .* got `object` - at `\$\.LocalPath`"),
    ],
)
def test_other_malformed_files_are_errors(tmp_path, files, message):
    """Every other file is checked as strictly as the list of hosts."""
    with pytest.raises(JobConfigError, match=message):
        read(write_job(tmp_path, SERVICE, **files))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SM_RESOURCE_CONFIG": "{"}, r"^SM_RESOURCE_CONFIG: not valid JSON"),
        ({"SM_RESOURCE_CONFIG": "{}"}, r"^SM_RESOURCE_CONFIG: Object missing required field `hosts`"),
        ({"SM_HOSTS": "algo-1"}, r"^SM_HOSTS: not valid JSON"),
        ({"SM_HOSTS": '{"a": 1}'}, r"^SM_HOSTS: Expected `array`, got `object`"),
        ({"SM_HOSTS": '["a"]'}, r"^SM_HOSTS/SM_CURRENT_HOST: .*`\$\.current_host`"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, r"current_host is 'b', not one of \['a'\]"),
        (
            {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a", "SM_INSTANCE_GROUPS_DICT": "[]"},
            r"^SM_INSTANCE_GROUPS_DICT: Expected `object`",
        ),
        (
            {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a", "SM_INSTANCE_GROUPS_DICT": '{"g": 1}'},
            r"^SM_HOSTS/SM_CURRENT_HOST: .*`\$\.instance_groups\[0\]`",
        ),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a", "SM_HPS": "x"}, r"^SM_HPS: not valid JSON"),
        (
            {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a", "SM_INPUT_DATA_CONFIG": "1"},
            r"^SM_INPUT_DATA_CONFIG: Expected",
        ),
    ],
)
def test_malformed_variables_are_errors_with_their_names(tmp_path, variables, message):
    """Variables from the toolkit are checked as strictly as the files."""
    with pytest.raises(JobConfigError, match=message):
        read(tmp_path, **variables)


# ---- settings


@pytest.mark.parametrize("text", ["0", "65536", "-1", "1.5", "many", " 80", "\u0663", "9" * 5000])
def test_port_out_of_range_is_an_error(tmp_path, text):
    """An invalid port raises an error that names the variable and its value."""
    with pytest.raises(
        JobConfigError, match=f"^LIGHTNING_SM_MAIN_PORT='{text[:197]}.*': expected a whole number from 1 to 65535"
    ):
        read(write_job(tmp_path, SERVICE), LIGHTNING_SM_MAIN_PORT=text)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("LIGHTNING_SM_DEVICES", "0", r"LIGHTNING_SM_DEVICES='0': expected a whole number from 1 to 1024"),
        ("LIGHTNING_SM_DEVICES", "auto", r"LIGHTNING_SM_DEVICES='auto': expected"),
        ("SM_NUM_GPUS", "x", r"SM_NUM_GPUS='x': expected"),
        ("LIGHTNING_SM_HOST_ADDRESSES", "10.0.0.1", r"HOST_ADDRESSES='10\.0\.0\.1': expected a JSON object"),
        ("LIGHTNING_SM_HOST_ADDRESSES", '["a"]', r"LIGHTNING_SM_HOST_ADDRESSES='\[\"a\"\]': expected a JSON object"),
        ("LIGHTNING_SM_HOST_ADDRESSES", '{"a": 1}', r"LIGHTNING_SM_HOST_ADDRESSES=.*got `int`"),
    ],
)
def test_malformed_setting_is_an_error(tmp_path, variable, text, message):
    """A malformed setting is never ignored silently."""
    with pytest.raises(JobConfigError, match=message):
        read(write_job(tmp_path, SERVICE), **{variable: text})


# ---- arbitrary content

host_names = st.sampled_from(["algo-1", "algo-2", "algo-3", "", "\u00e9"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | host_names | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
host_lists = st.lists(host_names, max_size=3) | json_values
entries = st.fixed_dictionaries(
    {}, optional={"instance_group_name": host_names, "hosts": host_lists, "instance_type": json_values}
)
almost_resources = st.fixed_dictionaries(
    {"current_host": host_names | json_values, "hosts": host_lists},
    optional={
        "current_group_name": json_values | host_names,
        "instance_groups": st.lists(entries, max_size=3) | json_values,
        "network_interface_name": json_values,
        "current_instance_type": json_values,
    },
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=(almost_resources | json_values).map(json.dumps) | st.binary(max_size=20))
def test_any_resource_file_gives_a_job_or_the_named_error(tmp_path, content):
    """Any content yields either a job whose groups partition its hosts, or JobConfigError."""
    write_job(tmp_path, content)
    try:
        job = read(tmp_path)
    except JobConfigError:
        return
    assert job.current_host in job.hosts
    assert sorted(host for group in job.groups for host in group.hosts) == sorted(job.hosts)
    assert job.current_host in job.current_group.hosts
