"""Parsing of values for the commands' options."""

from __future__ import annotations

import argparse

import pytest

from lightning_sm._arguments import did_you_mean, positive_whole_number


def test_numbers_above_zero_are_parsed():
    """Whole numbers become integers."""
    assert positive_whole_number("12") == 12


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "nan", "inf", "many", ""])
def test_anything_else_is_refused(text):
    """Any other text raises an error that shows it."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a positive whole number, got {text!r}"):
        positive_whole_number(text)


@pytest.mark.parametrize(
    ("word", "name"),
    [("paln", "plan"), ("--dryrun", "--dry-run"), ("--DRY_RUN", "--dry-run"), ("--once", "--once"), ("zebra", None)],
)
def test_a_similar_name_is_found_whatever_its_dashes(word, name):
    """Similar names are suggested regardless of dashes; without a similar name, there is no suggestion."""
    assert did_you_mean(word, ["plan", "doctor", "--dry-run", "--once"]) == (f" Did you mean {name}?" if name else "")
