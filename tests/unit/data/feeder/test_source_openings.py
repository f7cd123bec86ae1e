"""Tests of which data host opens which source, and of hosts that are lost, fail or have other data."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightning_sm.data.feeder.scheduler import Liveness
from lightning_sm.data.feeder.source_openings import SourceOpenings
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.openings import CallResult, Opening, StreamWorker
from lightning_sm.errors import DataHostMismatchError, DataServiceError, RemoteTransformError

INDEXED = Opening("train", "digest")
CALL = Opening("setup", "module", is_call=True)
MEMORY = object()
PROBLEM = Failure("RemoteTransformError", "KeyError: 3\nmore", "unpickling the dataset")


class Link:
    """A fake connection to a data host.

    Args:
        address: The data host's address.
    """

    def __init__(self, address):
        self.address = self.name = address
        self.state = Liveness.UP
        self.detail = ""
        self.wanted = []

    def want_source(self, opening):
        """Open a source."""
        self.wanted.append(opening.name)

    def release_source(self, name):
        """Close a source."""
        self.wanted = [other for other in self.wanted if other != name]


@pytest.fixture
def links():
    """Three data hosts."""
    return {name: Link(name) for name in "abc"}


@pytest.fixture
def told():
    """The messages to the training process."""
    return []


@pytest.fixture
def sources(links, told):
    """The openings of a rank."""
    return SourceOpenings(links, told.append)


def stream(number, rank=0, num_workers=4):
    """Return the opening of a worker of a stream."""
    return Opening(f"{rank}/{number}", "digest", StreamWorker(rank, 2, number, num_workers, seed=0))


def wanted(links):
    """Return the names of the openings on each host."""
    return [link.wanted for link in links.values()]


def test_an_indexed_source_is_opened_everywhere(sources, links):
    """An indexed source is opened on every host, and its memory is kept while another opening needs it."""
    sources.open(INDEXED, MEMORY)
    sources.open(Opening("val", "digest"), MEMORY)
    assert wanted(links) == [["train", "val"]] * 3
    sources.close("train")
    assert (wanted(links), sources.snapshot("digest"), sources.is_wanted("train")) == ([["val"]] * 3, MEMORY, False)
    sources.close("val")
    assert (wanted(links), sources.snapshot("digest")) == ([[]] * 3, None)


def test_what_one_host_does_for_all_is_opened_on_the_first(sources, links):
    """A call that one host makes for all, such as ``prepare_data()``, is opened on the first host."""
    sources.open(Opening("prepare", "module", is_call=True, is_alone=True), MEMORY)
    assert wanted(links) == [["prepare"], [], []]


def test_each_worker_of_a_stream_is_opened_on_one_host(sources, links):
    """The workers of a stream are spread evenly over the hosts; each rank begins with a different host."""
    for number in range(4):
        sources.open(stream(number), MEMORY)
    assert wanted(links) == [["0/0", "0/3"], ["0/1"], ["0/2"]]
    other = {name: Link(name) for name in "abc"}
    SourceOpenings(other, print).open(stream(0, rank=1), MEMORY)
    assert wanted(other) == [[], ["1/0"], []]


def test_the_streams_of_a_lost_host_go_to_others(sources, links):
    """The streams of a lost host move to the hosts with the fewest; if no other host is up, they wait."""
    for number in range(4):
        sources.open(stream(number), MEMORY)
    links["a"].state = Liveness.DOWN
    sources.tick(100.0)
    sources.tick(102.0)
    assert wanted(links) == [[], ["0/1", "0/0"], ["0/2", "0/3"]]
    links["b"].state = Liveness.SUSPECT
    sources.tick(103.0)
    sources.tick(105.0)
    links["c"].state = Liveness.SUSPECT
    sources.tick(106.0)
    sources.tick(109.0)
    assert wanted(links) == [[], [], ["0/2", "0/3", "0/0", "0/1"]]


def test_streams_go_to_no_host_that_receives_a_dataset(sources, links):
    """Streams of a lost host go to hosts that can start at once, and stay on a host that receives a dataset."""
    for number in range(3):
        sources.open(stream(number), MEMORY)
    links["a"].state = Liveness.DOWN
    links["b"].detail = "receiving a dataset (7 MB)"
    sources.tick(100.0)
    sources.tick(102.0)
    assert wanted(links) == [[], ["0/1"], ["0/2", "0/0"]]


def test_streams_stay_on_a_host_that_comes_up_soon(sources, links):
    """Streams stay on a host that comes up within 2 s, because it may be starting or restarting."""
    links["a"].state = Liveness.DOWN
    sources.open(stream(0), MEMORY)
    sources.tick(100.0)
    sources.tick(101.9)
    links["a"].state = Liveness.UP
    sources.tick(101.95)
    links["a"].state = Liveness.DOWN
    sources.tick(102.0)
    assert wanted(links) == [["0/0"], [], []]
    sources.tick(104.0)
    assert wanted(links) == [[], ["0/0"], []]


def test_the_training_process_is_told_what_is_open(sources, links, told):
    """The training process is told what is open, with the result of a call, but not what it has closed meanwhile."""
    sources.open(INDEXED, MEMORY)
    sources.open(CALL, MEMORY)
    sources.opened(links["a"], "train", None)
    sources.opened(links["a"], "setup", CallResult(b"loaders", {}))
    sources.close("train")
    sources.opened(links["b"], "train", None)
    assert [(one.name, one.error, one.result) for one in told] == [("train", "", b""), ("setup", "", b"loaders")]


def test_a_failure_counts_once_all_hosts_have_it(sources, links, told, caplog):
    """A failure counts once all hosts have it: one host may have a broken disk, or succeed later."""
    sources.open(INDEXED, MEMORY)
    sources.opened(links["a"], "train", PROBLEM)
    sources.opened(links["b"], "train", PROBLEM)
    assert not told
    assert "Continuing without data host a: unpickling the dataset failed: KeyError: 3" in caplog.text
    sources.opened(links["a"], "train", None)
    sources.opened(links["c"], "train", PROBLEM)
    assert [one.error for one in told] == [""]
    sources.opened(links["a"], "train", PROBLEM)
    assert isinstance(told[-1].exception(), RemoteTransformError)
    assert "KeyError: 3\nmore\non data host a, unpickling the dataset" in told[-1].text


@pytest.mark.parametrize("name", ["", "logging", "SystemExit", "LightningSMError"])
def test_an_error_of_no_data_host_is_the_general_one(sources, links, told, name):
    """An error name that data hosts do not use becomes the general error."""
    sources.open(stream(0), MEMORY)
    sources.opened(links["a"], "0/0", replace(PROBLEM, error=name))
    assert type(told[0].exception()) is DataServiceError


def test_the_failure_of_the_only_host_of_a_stream_counts(sources, links, told):
    """A failure of a stream's only host counts at once, because no other host opens the stream."""
    sources.open(stream(0), MEMORY)
    sources.opened(links["a"], "0/0", PROBLEM)
    assert told[0].error == "RemoteTransformError"


def test_hosts_with_other_data_are_an_error(sources, links, told):
    """The error names what differs on which host; a new call is compared afresh."""
    sources.open(CALL, MEMORY)
    sources.opened(links["b"], "setup", CallResult(b"1", {"dataset": "Numbers of 3", "package x": "1.0"}))
    sources.opened(links["a"], "setup", CallResult(b"2", {"dataset": "Numbers of 3", "package x": "1.0"}))
    assert len(told) == 2
    with pytest.raises(DataHostMismatchError) as caught:
        sources.opened(links["c"], "setup", CallResult(b"3", {"dataset": "Numbers of 4", "missing": "y"}))
    assert str(caught.value).splitlines()[:4] == [
        "Data hosts b and c have different data or packages:",
        "  dataset: Numbers of 3 on b, Numbers of 4 on c",
        "  missing: none on b, y on c",
        "  package x: 1.0 on b, none on c",
    ]
    assert len(told) == 2
    sources.close("setup")
    sources.open(CALL, MEMORY)
    sources.opened(links["c"], "setup", CallResult(b"3", {"dataset": "Numbers of 4"}))
    assert len(told) == 3
