"""Parsers of the commands' options."""

from __future__ import annotations

import argparse
import math


def positive_number(text: str) -> float:
    """Parse a number above zero, for ``type`` of ``argparse``.

    Raises:
        argparse.ArgumentTypeError: The text is not a positive number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def positive_whole_number(text: str) -> int:
    """Parse a whole number above zero, for ``type`` of ``argparse``.

    Raises:
        argparse.ArgumentTypeError: The text is not a positive whole number.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)
