"""Microbatches pass from rank to rank in either direction, also after an error."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sm.training.strategies.pipeline.exchange import Replica


class Rank(Replica):
    """The middle, first or last of three ranks; receives numbers, and records what it sends."""

    def __init__(self, position: int, arriving: list[Any]) -> None:
        self.position, self.is_first, self.is_last = position, position == 0, position == 2
        self.arriving, self.sent = arriving, []

    def receive(self, position: int, *, to_host: bool = False) -> Any:
        """The next value from the rank before."""
        self.sent.append(f"from {position}")
        return self.arriving.pop(0)

    def _start_sending(self, value: Any, position: int) -> list[Any]:
        """Record the value."""
        self.sent.append((value, position))
        return []


def passed(position: int, arriving: list[Any], *, is_backward: bool = False) -> tuple[list[Any], list[Any]]:
    """The results on a rank that adds ten, and what it exchanged."""
    rank = Rank(position, arriving)
    return rank.relay([1, 2], lambda number, value: value + 10 + number, is_backward=is_backward), rank.sent


@pytest.mark.parametrize(
    ("position", "is_backward", "results", "exchanged"),
    [
        (0, False, [], [(11, 1), (13, 1)]),
        (1, False, [], ["from 0", (15, 2), "from 0", (17, 2)]),
        (2, False, [15, 17], ["from 1", "from 1"]),
        (2, True, [], [(11, 1), (13, 1)]),
        (1, True, [], ["from 2", (15, 0), "from 2", (17, 0)]),
        (0, True, [15, 17], ["from 1", "from 1"]),
    ],
)
def test_values_go_through_all_ranks(position: int, is_backward: bool, results: Any, exchanged: Any):
    """The rank that begins uses the given values; the one at the end has the results."""
    assert passed(position, [5, 6], is_backward=is_backward) == (results, exchanged)


def test_after_an_error_none_is_passed_on():
    """A rank that fails raises its error only at the end, so that those after it get a value for each microbatch."""
    rank = Rank(1, [1, 2, 3])
    ran = []

    def run(number: int, value: int) -> int:
        ran.append(number)
        if number == 1:
            raise ZeroDivisionError
        return value

    with pytest.raises(ZeroDivisionError):
        rank.relay([None] * 3, run)
    assert [sent for sent in rank.sent if isinstance(sent, tuple)] == [(1, 2), (None, 2), (None, 2)]
    assert ran == [0, 1]
    assert passed(2, [None, 6]) == ([17], ["from 1", "from 1"])
