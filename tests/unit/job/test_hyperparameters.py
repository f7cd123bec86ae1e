"""Hyperparameters from every way to start a job become arguments that a real jsonargparse parser reads back."""

from __future__ import annotations

import json
import math
import re

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.hyperparameters import encode, to_argv
from tests.fakes.sdk_hyperparameters import ROUTES, sdk_v2_framework, sdk_v2_generic, sdk_v3

pytestmark = pytest.mark.filterwarnings("error::SyntaxWarning", "error::DeprecationWarning:lightning_sm")


# ---- tables

TABLE = [
    # Columns: value, type of the option, and the text from SDK v2 generic, SDK v2 framework and SDK v3.
    (True, bool, "True", "true", "true"),
    (False, bool, "False", "false", "false"),
    (None, int | None, "None", "null", "null"),
    (None, str | None, "None", "null", "null"),
    ({"a": 1, "b": 2}, dict, "{'a': 1, 'b': 2}", '{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
    ({"a": None, "b": [True]}, dict, "{'a': None, 'b': [True]}", '{"a": null, "b": [true]}', None),
    ([1, 2], list[int], "[1, 2]", "[1, 2]", "[1, 2]"),
    (["a", "b c"], list[str], "['a', 'b c']", '["a", "b c"]', '["a", "b c"]'),
    ((0.9, 0.99), tuple[float, float], "(0.9, 0.99)", "[0.9, 0.99]", "[0.9, 0.99]"),
    (1e-3, float, "0.001", "0.001", "0.001"),
    (1e-05, float, "1e-05", "1e-05", "1e-05"),
    ("a b", str, "a b", '"a b"', "a b"),
    ("007", str, "007", '"007"', "007"),
    ("", str, "", '""', ""),
    (math.inf, float, "inf", "Infinity", "Infinity"),
    (-math.inf, float, "-inf", "-Infinity", "-Infinity"),
    (math.nan, float, "nan", "NaN", "NaN"),
    ([math.nan, math.inf], list[float], None, "[NaN, Infinity]", "[NaN, Infinity]"),
    ({"a": -math.inf}, dict[str, float], None, '{"a": -Infinity}', '{"a": -Infinity}'),
]


@pytest.mark.parametrize(("value", "kind", "generic", "framework", "v3"), TABLE)
def test_each_route_brings_each_kind_of_value(value, kind, generic, framework, v3):
    """A value reaches an option of its type, whichever way it was sent."""
    for route, stated in ((sdk_v2_generic, generic), (sdk_v2_framework, framework), (sdk_v3, v3)):
        text = route({"k": value})["k"]
        if stated is None:  # the same kind of text as in another row, or documented as lost
            continue
        assert text == stated
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--k", type=kind)
        assert repr(parser.parse_args(to_argv(route({"k": value}))).k) == repr(value)


@pytest.mark.parametrize(
    ("hyperparameters", "argv"),
    [
        ({}, []),
        ({"subcommand": "fit", "b": "4", "a.b": "x"}, ["fit", "--a.b=x", "--b=4"]),
        ({"subcommand": '"my-step"', "x": "1"}, ["my-step", "--x=1"]),
        ({"data.y": "1", "data": '{"y": 0}', "c": "2"}, ["--c=2", '--data={"y": 0}', "--data.y=1"]),
        ({"a": "1e-3", "b": "007", "c": "+1", "d": "1."}, ["--a=1e-3", "--b=007", "--c=+1", "--d=1."]),
        ({"config": "x.yaml", "a": "1"}, ["--config=x.yaml", "--a=1"]),
        ({"config": '"x.yaml"', "a": "1"}, ["--config=x.yaml", "--a=1"]),
        ({"config": "['x.yaml', 'y z.yaml']"}, ["--config=x.yaml", "--config=y z.yaml"]),
        ({"config": '["x.yaml", "y.yaml"]', "subcommand": '"test"'}, ["test", "--config=x.yaml", "--config=y.yaml"]),
        ({"config": "None", "subcommand": "None"}, []),
        ({"config": '{"a": 1}'}, ['--config={"a": 1}']),
        ({"some-dashed.key_1": "1"}, ["--some-dashed.key_1=1"]),
        (
            {
                "sagemaker_program": '"train.py"',
                "_tuning_objective_metric": "loss",
                "_tuning_other": "1",
                "default_user_module_name": "x",
                "mp_parameters": "{}",
                "a": '"quoted"',
            },
            ["--a=quoted"],
        ),
        ({"a": '"quoted"', "b": "not json"}, ['--a="quoted"', "--b=not json"]),
        (
            {
                "_tuning_objective_metric": "val_acc",
                "a": '"quoted"',
                "b": "adam",
                "c": '"sgd"',
                "d": "1.0E-4",
                "e": "None",
            },
            ["--a=quoted", "--b=adam", "--c=sgd", "--d=1.0E-4", "--e=null"],
        ),
        ({"_tuning_objective_metric": "val_acc", "b": "adam", "c": '"None"'}, ["--b=adam", "--c=None"]),
        ({"a": '{"x":1}', "b": "x"}, ['--a={"x":1}', "--b=x"]),
        ({"a": '{"x":\t1}'}, ['--a={"x": 1}']),
        ({"a": "{1: 'x', None: ()}"}, ['--a={"1": "x", "null": []}']),
        ({"a": '"None"', "b": '"nan"', "c": "\"['a']\""}, ["--a=None", "--b=nan", "--c=['a']"]),
    ],
)
def test_arguments_are_in_a_fixed_order_and_change_little(hyperparameters, argv):
    """The subcommand comes first, then config files, then one token per option, sorted by key."""
    assert to_argv(hyperparameters) == argv


@pytest.mark.parametrize(
    "text",
    ["{'a': nan}", "{1, 2}", "[b'x']", "[1](2)", "[unquoted]", "(1)", "(" * 400, "[" * 100_000, "{" * 2500, "9" * 5000],
)
def test_text_that_is_no_plain_literal_is_left_alone(text):
    """Text that neither JSON nor Python's literal syntax accepts is passed on unchanged."""
    assert to_argv({"a": text, "b": "not json"}) == [f"--a={text}", "--b=not json"]


def test_config_files_of_the_caller_come_before_those_of_the_job():
    """Config files of the caller come first, because later files win and the job's file must override the channel."""
    argv = to_argv({"config": "own.yaml", "a": "1", "subcommand": "fit"}, config_files=["c/1.yaml", "c/2.yaml"])
    assert argv == ["fit", "--config=c/1.yaml", "--config=c/2.yaml", "--config=own.yaml", "--a=1"]


@pytest.mark.parametrize("key", ["", "a=b", "a b", "a\tb", "-a", "--a", "\n"])
def test_key_that_forms_no_option_is_an_error(key):
    """Both directions reject a key that the parser would misread, and the error names it."""
    with pytest.raises(HyperparameterError, match=re.escape(f"Hyperparameter {key!r} cannot be an option")):
        to_argv({key: "1"})
    with pytest.raises(HyperparameterError, match="cannot be an option"):
        encode({key: 1})


@pytest.mark.parametrize("subcommand", ["", "1fit", "--fit", "fit now", "[]", "f\u00eft", "fit\n"])
def test_subcommand_must_be_a_word(subcommand):
    """The subcommand becomes a bare argument and must therefore be a word."""
    with pytest.raises(HyperparameterError, match=r"'subcommand' is .*expected a word"):
        to_argv({"subcommand": subcommand})


def test_config_list_of_other_things_than_paths_is_an_error():
    """A list under ``config`` must contain paths."""
    with pytest.raises(HyperparameterError, match=r"'config' is '\[1, 2\]'; expected a path or a list of paths"):
        to_argv({"config": "[1, 2]"})


@pytest.mark.parametrize("text", ["a\0b", '"\\ud800"', '["\\udfff", null]'])
def test_text_that_no_process_can_take_is_an_error(text):
    """NUL and lone surrogates raise an error before the process starts."""
    with pytest.raises(HyperparameterError, match=r"'a\.b' is .*cannot contain NUL or lone surrogates"):
        to_argv({"a.b": text})


# ---- encode


def test_encode_writes_json_and_leaves_nested_dicts_whole():
    """A nested dict is encoded as one value, because only the script's parser can interpret it."""
    config = {"subcommand": "fit", "data.batch_size": 32, "model": {"class_path": "m.M", "init_args": {"x": None}}}
    assert encode(config) == {
        "subcommand": '"fit"',
        "data.batch_size": "32",
        "model": '{"class_path": "m.M", "init_args": {"x": null}}',
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"k": "x" * 2499}, r"'k' has 2501 characters in JSON; SageMaker allows 2500"),
        ({"k": {1, 2}}, r"'k' is \{1, 2\}, which cannot be converted to JSON"),
    ],
)
def test_encode_refuses_what_sagemaker_or_the_way_back_would_not_take(config, message):
    """Values over the API's limit, or without a JSON form, raise an error before the job is submitted."""
    with pytest.raises(HyperparameterError, match=message):
        encode(config)


# ---- classes


class Net:
    """A base class for subclass mode."""


class WideNet(Net):
    """A subclass with one parameter of each easily confused type."""

    def __init__(self, width: int = 1, label: str = "x", extra: dict | None = None):
        """Accept the values that the parser reads from this signature."""


class Data:
    """A class for a group of options."""

    def __init__(self, batch_size: int = 1, path: str = "p", betas: tuple[float, float] = (0.9, 0.99)):
        """Accept the values that the parser reads from this signature."""


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "config",
    [
        {
            "data": {"batch_size": 3, "path": "-007"},
            "data.betas": [0.5, 0.6],
            "net": {"class_path": "WideNet", "init_args": {"width": 2, "label": "12", "extra": {"a": [None, True]}}},
            "table": {"a": {"b": "12"}},
        },
        {
            "data.batch_size": 3,
            "data.path": "-007",
            "data.betas": [0.5, 0.6],
            "net.class_path": "WideNet",
            "net.init_args.width": 2,
            "net.init_args.label": "12",
            "net.init_args.extra": {"a": [None, True]},
            "table": {"a": {"b": "12"}},
        },
    ],
)
def test_class_group_subclass_and_dict_are_read_nested_and_dotted(route, config):
    """A class group, a subclass with init_args and a dict parameter accept both spellings by every route."""
    text = json.dumps(config).replace("WideNet", f"{__name__}.WideNet")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Data, "data")
    parser.add_subclass_arguments(Net, "net")
    parser.add_argument("--table", type=dict)
    values = parser.parse_args(to_argv(route(json.loads(text))))
    assert values.data.as_dict() == {"batch_size": 3, "path": "-007", "betas": (0.5, 0.6)}
    assert values.net.class_path == f"{__name__}.WideNet"
    assert values.net.init_args.as_dict() == {"width": 2, "label": "12", "extra": {"a": [None, True]}}
    assert values.table == {"a": {"b": "12"}}


def test_keys_win_over_config_files(tmp_path):
    """Values from the config file are kept unless a key overrides them."""
    file = tmp_path / "own config.yaml"
    file.write_text("data: {batch_size: 7, path: from file}\n")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Data, "data")
    values = parser.parse_args(to_argv({"data.batch_size": "8"}, config_files=[str(file)]))
    assert (values.data.batch_size, values.data.path) == (8, "from file")


# ---- the toolkit


@pytest.mark.toolkit
@pytest.mark.parametrize(
    ("key", "kind", "value"), [("table", dict, {"a": 1, "b": 2}), ("none", int | None, None), ("b", int, 4)]
)
def test_values_that_the_toolkit_mangles_arrive(key, kind, value):
    """These values break sagemaker-training's command line, but survive ours."""
    mapping = pytest.importorskip("sagemaker_training.mapping", reason="needs sagemaker-training")
    hyperparameters = {key: json.dumps(value)}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{key}", type=kind)
    theirs = mapping.to_cmd_args({name: json.loads(text) for name, text in hyperparameters.items()})
    with pytest.raises(ArgumentError, match=r"(?i)expected a|does not validate|unrecognized arguments"):
        parser.parse_args(theirs)
    assert parser.parse_args(to_argv(hyperparameters))[key] == value
