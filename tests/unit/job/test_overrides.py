"""Hyperparameters as overrides for Hydra's command line."""

from __future__ import annotations

import json

import pytest

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.overrides import to_overrides


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", "3"),
        ("0.001", "0.001"),
        ("true", "true"),
        ("null", "null"),
        ("None", "null"),
        ("nan", "nan"),
        ("adam", "adam"),
        ("data/part-1.csv", "data/part-1.csv"),
        ("s3://bucket/x", "'s3://bucket/x'"),
        ("a,b", "'a,b'"),
        ("a b", "'a b'"),
        ("it's", r"'it\'s'"),
        ("a\\", r"'a\\'"),
        ("", "''"),
        ("TRUE", "'TRUE'"),
        ('[1, "a b", null]', "[1,'a b',null]"),
        ("{'lr': 0.1, 'betas': (0.9, 0.99)}", "{lr:0.1,betas:[0.9,0.99]}"),
    ],
)
def test_values(text, expected):
    """Text is quoted where Hydra would misread it; lists and dicts get Hydra's syntax, whichever SDK wrote them."""
    assert to_overrides({"a.b": text, "x": "raw text"}) == [f"a.b={expected}", "x='raw text'"]


def test_names():
    """Hydra's options come first, additions keep their sign, and the toolkit's hyperparameters are dropped."""
    hyperparameters = {"z": "1", "config-name": "gpu", "+new": "2", "sagemaker_program": "t.py", "config": "x"}
    assert to_overrides(hyperparameters) == ["--config-name=gpu", "+new=2", "config=x", "z=1"]


def test_quoted_text_of_a_framework_estimator_is_text():
    """Quoted values from a framework estimator are decoded, because all of its values are JSON."""
    assert to_overrides({"a": '"it is"', "b": "3"}) == ["a='it is'", "b=3"]


@pytest.mark.parametrize("hyperparameters", [{"a": json.dumps({"x y": 1})}, {"a b": "1"}, {"a": "\0"}])
def test_what_has_no_form_is_an_error(hyperparameters):
    """A value or name without a Hydra form raises an error that names the hyperparameter."""
    with pytest.raises(HyperparameterError, match="Hyperparameter 'a"):
        to_overrides(hyperparameters)
