"""What data hosts say of their loaders is compared, and passed on once."""

from __future__ import annotations

import pytest

from lightning_sm.data.feeder.agreement import LoaderAgreements
from lightning_sm.data.protocol.calls import Loaders, Problem, SetUp
from lightning_sm.data.protocol.failures import USER_ERRORS
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.errors import DataHostMismatchError, DataServiceError


def missing(number):
    """Return names of what ``setup`` leaves out."""
    return [f"x{number}"]


class Asked:
    """An agreement on one request for loaders, and the replies that it passes on."""

    def __init__(self, num_hosts):
        self.answers = []
        self.agreement = LoaderAgreements(num_hosts, lambda _, reply: self.answers.append(reply.missing))
        self.agreement.request("o")

    def says(self, host, number, now=0.0, name="o"):
        """Add a host's reply, and return the error, as text."""
        try:
            self.agreement.add_reply(name, host, SetUp({"folder": host}, missing(number)), now)
        except DataHostMismatchError as error:
            return str(error)

    def fails(self, host, error):
        """Add a host's failure, and return the first line of the error."""
        try:
            self.agreement.add_reply("o", host, Problem(error, "OSError: no space left"), 0.0)
        except DataServiceError as raised:
            return type(raised).__name__, str(raised)


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


def test_a_request_that_comes_again_is_answered_again():
    """Ranks ask one after the other; before the hosts agree, none has an answer."""
    asked = Asked(2)
    asked.says("a", 7)
    asked.agreement.request("o")
    assert asked.answers == []
    asked.says("b", 7)
    asked.agreement.request("o")
    asked.agreement.request("another")
    assert asked.answers == [missing(7)] * 2


def test_a_host_that_was_late_once_is_not_waited_for_again():
    """Each request for loaders would take the patience of five seconds."""
    asked = Asked(3)
    asked.says("a", 7, now=0.0)
    asked.says("b", 7, now=0.0)
    asked.agreement.tick(5.0)
    asked.says("a", 8, now=6.0, name="p")
    assert asked.answers == [missing(7)]
    asked.says("b", 8, now=6.0, name="p")
    assert asked.answers == [missing(7), missing(8)]


def test_the_patience_begins_with_the_first_reply():
    """Further replies do not extend it, and the answer is that of the first host that replied."""
    asked = Asked(3)
    asked.agreement.tick(100.0)
    for host, now in (("b", 100.0), ("a", 104.9)):
        asked.says(host, 7, now=now)
    assert asked.answers == []
    asked.agreement.tick(105.1)
    assert asked.answers == [missing(7)]
    assert asked.agreement._agreements["o"].reply.attributes == {"folder": "b"}


@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 1, 2, 2), (1, 2, 3, 4)])
def test_without_a_majority_none_is_blamed(numbers):
    """Half of the hosts, or fewer, are no majority."""
    asked = Asked(len(numbers))
    *_, error = [asked.says(str(host), number) for host, number in enumerate(numbers)]
    assert error.startswith("Data hosts serve different data:\n")


@pytest.mark.parametrize("error", [*USER_ERRORS, "DataSettingsError"])
def test_a_failure_before_the_hosts_agree_ends_the_training(error):
    """Of whatever kind: it names the host."""
    kind, text = Asked(2).fails("b", error)
    assert (kind, text) == (error, "OSError: no space left\non data host b")


def test_a_training_that_has_begun_goes_on_without_a_host_on_which_the_users_code_fails():
    """One full disk is no reason to end it; settings that do not fit are."""
    asked = Asked(1)
    asked.says("a", 7)
    assert [asked.fails("b", error) for error in USER_ERRORS] == [None, None]
    assert asked.fails("b", "DataSettingsError")[0] == "DataSettingsError"
    assert asked.answers == [missing(7)]


def test_what_the_hosts_read_may_be_in_another_structure():
    """The loaders are equal, but one host has them in a list: a script that asks where it runs."""
    agreement = LoaderAgreements(2, lambda *_: None)
    agreement.add_reply("o", "a", Loaders(0, []), 0.0)
    with pytest.raises(DataHostMismatchError, match=r"  a: structure: 0\n  b: structure: \[0\]\n"):
        agreement.add_reply("o", "b", Loaders([0], []), 0.0)


def test_a_host_that_was_late_for_one_request_only_is_not_waited_for_either():
    """Three of four hosts have replied to the second request when two are found to be enough for the first."""
    asked = Asked(4)
    for host in "ab":
        asked.says(host, 7, now=0.0)
    for host in "abc":
        asked.says(host, 8, now=4.0, name="p")
    asked.agreement.tick(5.0)
    assert asked.answers == [missing(7), missing(8)]
