"""Arbitrary hyperparameters survive every way to start a job, or raise an error that names the cause."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.hyperparameters import encode, to_argv
from tests.fakes.sdk_hyperparameters import ROUTES, Route, sdk_v2_framework

pytestmark = pytest.mark.filterwarnings("error::SyntaxWarning", "error::DeprecationWarning:lightning_sm")


def parser_for(config: Mapping[str, Any]) -> ArgumentParser:
    """Return a parser with one option per key, typed like the key's value."""
    parser = ArgumentParser(exit_on_error=False)
    for key, value in config.items():
        kind = int | None if value is None else type(value)
        parser.add_argument(f"--{key}", type=kind)
    return parser


def parsed(argv: list[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a parser for the config reads from the arguments, by option name."""
    namespace = parser_for(config).parse_args(argv)
    return {key: namespace[key] for key in config}


# ---- strategies

# Exclude NUL, which no process accepts in an argument, lone surrogates, which are not text, and "--", which
# Python 3.11 and 3.12 drop.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.text(characters, max_size=12).filter(lambda text: text != "--")
tricky_texts = st.sampled_from(
    [
        *("", " ", "-", "---", "-x", "--fit", "007", "1e-3", "1_000", "0x10", "12:30", "2001-01-01", "true", "null"),
        *("None of it", "~", "yes", "# c", "a: b", "a b", "a=b", "'q'", '"', '"q', "\\", "[", "{", "a,b", "!x", "&x"),
        *("*x", "%d", "$HOME", "`id`", "\u00e9", "\u2603", "\U0001f600", "\x85", "\u2028", "\ufeff", "\x7f", "a\nb"),
        *("\t", "k__0", "@file", "?", "|", ">", "class_path"),
    ]
)
strings = tricky_texts | texts
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False, width=64) | strings
)
containers = st.recursive(
    st.lists(scalars, max_size=4) | st.dictionaries(strings, scalars, max_size=4),
    lambda inner: st.lists(inner | scalars, max_size=3) | st.dictionaries(strings, inner | scalars, max_size=3),
    max_leaves=8,
)
# Exclude dashes: jsonargparse reads "a-b" as "a_b", so two options could collide. Exclude prefixes such as "a" and
# "a.b.c", which are a value and a group at once: dotted names begin with two letters, all others have one.
words = st.text(string.ascii_letters + string.digits + "_", min_size=2, max_size=6)
names = st.tuples(words, words, words).map(".".join).filter(lambda name: "__" not in name) | st.sampled_from(
    list(string.ascii_lowercase)
)
configs = st.dictionaries(names, scalars | containers, max_size=6)


def is_json(text: str) -> bool:
    """Return whether the text is valid JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def reads_like_a_value(text: str) -> bool:
    """Return whether the unquoted routes would confuse the text with None, a number or a container."""
    if text in {"None", "nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"}:
        return True
    return text.startswith(("[", "{", "(")) and text.endswith(("]", "}", ")"))


def is_ambiguous(route: Route, config: Mapping[str, Any]) -> bool:
    """Return whether the route loses information that needs quotes; the framework route and ``encode`` lose none."""
    if route in (sdk_v2_framework, encode):
        return False
    strings_of = [value for value in config.values() if isinstance(value, str)]
    quoted = any(value.strip().startswith('"') for value in strings_of)
    return any(map(reads_like_a_value, strings_of)) or (quoted and all(map(is_json, route(config).values())))


# ---- properties


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs)
@example(config={"a": '"a b"', "b": "x"})
@example(config={"a": {"\U0001f600": ["\u2028", None, {"": "\x7f"}]}, "b": [[], {}]})
@example(config={"a": 1e22, "b": 5e-324, "c": -0.0, "d": -1, "e": True, "f": None})
@example(config={"a": "[1, 2", "b": "None", "c": "nan", "d": "('a', 1)", "e": "[1]"})
def test_any_json_like_config_survives_each_route_through_a_real_parser(route, config):
    """Every value that a route can represent arrives unchanged at a jsonargparse option of its type."""
    assume(not is_ambiguous(route, config))
    values = parsed(to_argv(route(config)), config)
    assert repr(values) == repr(dict(config))


@settings(max_examples=100)
@given(
    st.dictionaries(st.text(max_size=8), strings | st.sampled_from(["None", "[1", "{'a': nan}", "{1, 2}", "(b'',)"]))
)
def test_any_strings_give_arguments_or_the_named_error(hyperparameters):
    """Arbitrary strings yield options or HyperparameterError."""
    try:
        argv = to_argv(hyperparameters)
    except HyperparameterError:
        return
    assert all(argument.startswith("--") for argument in argv[1:])
