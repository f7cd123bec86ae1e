"""What data hosts say of their loaders is compared, and passed on once."""

from __future__ import annotations

import pytest

from lightning_sm.data.feeder.agreement import LoaderAgreements
from lightning_sm.data.protocol.calls import Loaders, SetUp
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.errors import DataHostMismatchError


def missing(number):
    """Return names of what ``setup`` leaves out."""
    return [f"x{number}"]


class Asked:
    """An agreement on one request for loaders, and the replies that it passes on."""

    def __init__(self, num_hosts):
        self.answers = []
        self.agreement = LoaderAgreements(num_hosts, lambda _, reply: self.answers.append(reply.missing))
        self.agreement.request("o")

    def says(self, host, number, now=0.0):
        """Add a host's reply, and return the error, as text."""
        try:
            self.agreement.add_reply("o", host, SetUp({"folder": host}, missing(number)), now)
        except DataHostMismatchError as error:
            return str(error)


def test_an_answer_on_which_all_agree_is_passed_on_once():
    """It comes when the last host has spoken, and not again when one is asked again."""
    asked = Asked(2)
    assert asked.says("a", 7) is None
    assert asked.answers == []
    assert asked.says("b", 7) is None
    assert asked.says("b", 7) is None
    assert asked.answers == [missing(7)]


def test_a_slow_host_does_not_hold_up_the_others():
    """After some seconds those that are there are enough; who comes later and differs is a problem then."""
    asked = Asked(3)
    asked.says("a", 7, now=0.0)
    asked.says("b", 7, now=1.0)
    asked.agreement.tick(4.9)
    assert asked.answers == []
    asked.agreement.tick(5.0)
    assert asked.answers == [missing(7)]
    assert asked.says("c", 8, now=60.0).startswith("Data hosts serve different data (different from most: c):")


@pytest.mark.parametrize("numbers", [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_the_odd_one_is_named_in_whatever_order_they_answer(numbers):
    """Two that differ wait for the third; all are described."""
    asked = Asked(3)
    texts = [asked.says(host, number) for host, number in zip("abc", numbers, strict=True)]
    odd = "abc"[numbers.index(1)]
    assert texts[:2] == [None, None]
    assert f"different data (different from most: {odd}):" in texts[2]
    assert all(f"{host}: missing: {missing(number)}" in texts[2] for host, number in zip("abc", numbers, strict=True))
    assert asked.answers == []


def test_the_error_has_what_differs_and_nothing_else():
    """A loader has a dozen facts, of which one is wrong; a host may have another loader, too."""
    errors = []
    agreement = LoaderAgreements(2, lambda *_: None)
    for host, loaders in (("a", [("x", 8)]), ("b", [("x", 16), ("y", 8)])):
        descriptions = [
            LoaderDescription(name, "shuffled", 8, size, False, "i", "f", "Fake of 8") for name, size in loaders
        ]
        try:
            agreement.add_reply("o", host, Loaders(0, descriptions), 0.0)
        except DataHostMismatchError as error:
            errors = str(error).splitlines()
    assert errors[1:3] == [
        "  a: x batch_size: 8",
        "  b: x batch_size: 16, y name: y, y order: shuffled, y num_samples: 8, y batch_size: 8, y drop_last: False, "
        "y identity: i, y fingerprint: f, y dataset: Fake of 8, y is_split: False, y own_sampler: , "
        "y num_batches: None, y dataset_length: None, "
        "y num_workers: 0, y has_indices: False",
    ]


def test_of_two_that_differ_none_is_blamed():
    """With no majority, both are described, once the third does not come."""
    asked = Asked(3)
    assert [asked.says("a", 1), asked.says("b", 2)] == [None, None]
    with pytest.raises(DataHostMismatchError, match=r"^Data hosts serve different data:\n"):
        asked.agreement.tick(5.0)
    asked.agreement.tick(6.0)
