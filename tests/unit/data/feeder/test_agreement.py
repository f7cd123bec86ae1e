"""What data hosts say of their loaders is compared, and passed on once."""

from __future__ import annotations

import pytest

from lightning_sm.data.feeder.agreement import Openings


class Asked:
    """Openings of which one was asked for, and the answers to it."""

    def __init__(self, num_hosts):
        self.answers = []
        self.openings = Openings(num_hosts, lambda _, reply: self.answers.append(reply["structure"]))
        self.openings.ask("o")

    def says(self, host, number, now=0.0):
        """Take a host's answer, and return what is wrong, as text."""
        problem = self.openings.opened("o", host, {"structure": number, "attributes": {"folder": host}}, now)
        return problem and problem.text


def test_an_answer_on_which_all_agree_is_passed_on_once():
    """It comes when the last host has spoken, and not again when one is asked again."""
    asked = Asked(2)
    assert asked.says("a", 7) is None
    assert asked.answers == []
    assert asked.says("b", 7) is None
    assert asked.says("b", 7) is None
    assert asked.answers == [7]


def test_a_slow_host_does_not_hold_up_the_others():
    """After some seconds those that are there are enough; who comes later and differs is a problem then."""
    asked = Asked(3)
    asked.says("a", 7, now=0.0)
    asked.says("b", 7, now=1.0)
    assert asked.openings.tick(4.9) is None
    assert asked.answers == []
    assert asked.openings.tick(5.0) is None
    assert asked.answers == [7]
    assert asked.says("c", 8, now=60.0).startswith("Data hosts serve different data, c other than most:")


@pytest.mark.parametrize("numbers", [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_the_odd_one_is_named_in_whatever_order_they_answer(numbers):
    """Two that differ wait for the third; all are described."""
    asked = Asked(3)
    texts = [asked.says(host, number) for host, number in zip("abc", numbers, strict=True)]
    odd = "abc"[numbers.index(1)]
    assert texts[:2] == [None, None]
    assert f"different data, {odd} other than most:" in texts[2]
    assert all(f"{host}: {{" in texts[2] for host in "abc")
    assert asked.answers == []


def test_of_two_that_differ_none_is_blamed():
    """With no majority, both are described, once the third does not come."""
    asked = Asked(3)
    assert [asked.says("a", 1), asked.says("b", 2)] == [None, None]
    problem = asked.openings.tick(5.0)
    assert problem.error == "DataHostMismatchError"
    assert problem.text.startswith("Data hosts serve different data:\n")
    assert asked.openings.tick(6.0) is None
