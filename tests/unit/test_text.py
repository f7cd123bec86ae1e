"""Formatting numbers, times and names as text."""

from __future__ import annotations

import io

import pytest

from lightning_sm._text import (
    clock_time,
    count,
    duration,
    for_terminal,
    listed,
    percent,
    plain,
    rate,
    shortened,
    size,
    times,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0184, "18.4 ms"), (1.5, "1.5 s"), (99.96, "100 s"), (125, "2 min 5 s"), (1080, "18 min"),
     (3599.6, "1 h"), (11_520, "3 h 12 min")],
)  # fmt: skip
def test_a_duration_has_two_units_at_most(seconds, text):
    """Below two minutes, a duration has three digits; above, it has whole units without zeros."""
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (100_000, "27:46:40")])
def test_hours_on_a_clock_do_not_turn_into_days(seconds, text):
    """A duration of more than a day is shown in hours."""
    assert clock_time(seconds) == text


def test_numbers_agree_with_their_nouns():
    """Only the number 1 takes the singular."""
    assert [count(number, "host") for number in (0, 1, 4800)] == ["0 hosts", "1 host", "4,800 hosts"]
    assert count(2, "batch", "batches") == "2 batches"
    assert [times(number) for number in (1, 3)] == ["once", "3 times"]


def test_a_trace_of_something_is_not_nothing():
    """A share that rounds to 0% is shown as less than 1%; bytes have the largest unit that fits."""
    assert [percent(share) for share in (0, 0.001, 0.444, 1)] == ["0%", "<1%", "44%", "100%"]
    assert [size(number) for number in (999, 1.5e6, 2e12)] == ["999 B", "1.5 MB", "2 TB"]


def test_a_rate_has_no_exponent():
    """Rates have no exponent, however large: 12,345 samples per second used to be shown as 1.235e+04."""
    assert [rate(number) for number in (0.0, 0.00123, 0.25, 12.345, 99.96, 12345.6)] == [
        *("0", "0.00123", "0.25", "12.3", "100", "12,346")
    ]


def test_of_many_names_only_the_first_are_shown():
    """The total number of names follows the shown names."""
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(number) for number in range(100)], most=2) == "0, 1, ... (100 in all)"


def test_a_shortened_text_has_the_length_that_is_allowed():
    """The ellipsis counts towards the maximum length, and a text that fits stays whole."""
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abc..."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[31mred\x1b[0m b", "ared b"),
        ("\x1b[2J\x1b[1;1H\x1b[?25lgone", "gone"),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07a\x1b]52;c;cGF5bG9hZA==\x1b\\b", "ab"),
        ("\x9d52;c;cGF5bG9hZA==\x9cb", "b"),
        ("\x1bP1$r\x1b\\a\x1bc\x1b(0b", "ab"),
        ("\x1b]52;c;unterminated", "52;c;unterminated"),
        ("x\b\b\rforged\x00\x7f\x85", "xforged"),
        ("\ttab\nline äöü 日本 \U0001f600", "\ttab\nline äöü 日本 \U0001f600"),
    ],
)
def test_a_terminal_has_nothing_to_act_upon(text, expected):
    """7-bit and 8-bit escape sequences and control characters are removed; tab, line feed and letters stay."""
    assert plain(text) == expected


def test_only_terminals_get_plain_text():
    """Files and pipes get the text unchanged."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert for_terminal("\x1b[31mred", Terminal()) == "red"
    assert for_terminal("\x1b[31mred", io.StringIO()) == "\x1b[31mred"
