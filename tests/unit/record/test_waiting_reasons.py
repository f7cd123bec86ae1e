"""The verdict names what held up training, and ignores short waits."""

import pytest
from msgspec.structs import replace

from lightning_sm.record.data_figures import HostFigures, RankFigures
from lightning_sm.record.waiting_reasons import trouble, verdict, wait_cause

# An epoch of 100 steps that takes 10 s and never waits.
RANK = RankFigures(
    num_batches=101,
    num_steps=101,
    num_timed=100,
    num_bytes=1_010_000_000,
    busy_s=10.0,
    sync_s=8.0,
    queue_s=0.1,
    produce_s=20.0,
    transfer_s=1.0,
)
# Two workers that built these batches with time to spare.
HOST = HostFigures(
    "algo-3", workers=2, busy_s=10.0, capacity_s=40.0, num_built=100, built_s=20.0, num_received=50, transfer_s=0.5
)


def ranks(*figures):
    """Return figures by rank name."""
    return {f"rank {number} on algo-{number + 1}": one for number, one in enumerate(figures)}


def hosts(*figures):
    """Return data hosts with distinct names."""
    return [replace(one, name=f"algo-{number + 3}") for number, one in enumerate(figures)]


def waiting(wait_s, transfer_wait_s=0.0, **changes):
    """Return the figures of a rank that waited."""
    return replace(RANK, wait_s=wait_s, transfer_wait_s=transfer_wait_s, **changes)


def test_nothing_is_said_when_nothing_is_wrong():
    """The verdict is empty for ranks that do not wait, and before any rank has figures."""
    assert verdict(ranks(*[RANK] * 4), hosts(HOST, HOST)) == ""
    assert verdict({}, hosts(HOST)) == ""


@pytest.mark.parametrize(
    "rank",
    [
        replace(RANK, wait_s=0.0028, busy_s=0.0372, sync_s=0.03),
        replace(RANK, wait_s=0.9, busy_s=0.1, sync_s=0.08),
        replace(RANK, wait_s=2.0, busy_s=58.0, sync_s=50.0),
    ],
    ids=["7% of 0.04 s", "90% of 1 s", "2 s of 60 s"],
)
def test_trifles_are_no_advice(rank):
    """A wait is reported only if it is a notable part of the epoch and lasts some seconds."""
    assert verdict(ranks(rank, rank), hosts(replace(HOST, busy_s=40.0))) == ""


def test_slow_transforms_need_workers():
    """The verdict suggests more workers without a number, which only ``plan`` computes, from the hosts."""
    slow = [waiting(290.0, produce_s=200.0, queue_s=100.0)] * 2
    text = verdict(ranks(*slow), [replace(HOST, workers=6, busy_s=1710.0, capacity_s=1800.0)])
    assert text.startswith(
        "Training waits 97% of the time for the transforms: the 6 workers of the data hosts are busy"
    )
    assert "busy 95% of the time, at 1.98 s per batch. Make the transforms cheaper, or use more workers" in text


def test_a_slow_network_is_named_with_its_rate():
    """The network is named if batches are in transit for most of the wait while workers are idle."""
    text = verdict(ranks(waiting(90.0, 80.0, transfer_s=150.0), waiting(88.0, 78.0)), hosts(HOST, HOST))
    assert text.startswith(
        "Training waits 90% of the time for the network: of the 1.68 s from request to batch, 1.49 s"
    )
    assert "(10 MB a batch, 10.1 MB/s on average)" in text
    assert "workers" not in text


def test_a_rank_with_slow_code_of_its_own_is_named():
    """A slow rank is named if the others wait for it in the backward pass and no rank waits for data."""
    slow = replace(RANK, busy_s=100.0, sync_s=2.0)
    others = [replace(RANK, busy_s=100.0, sync_s=98.0)] * 3
    text = verdict(ranks(others[0], slow, *others[1:]), hosts(HOST))
    assert text == (
        "Rank 1 on algo-2 holds up the others: apart from the backward pass and the optimizer, its own code takes "
        "980 ms a step, compared with 20 ms on the others."
    )


def test_a_rank_that_waits_for_its_data_holds_up_the_others_by_data():
    """The rank that waits for data is named, although the others seem busy while they wait in the backward pass."""
    own = waiting(62.0, produce_s=60.0, busy_s=38.0, sync_s=36.0)
    others = [replace(RANK, busy_s=100.0, sync_s=98.0)] * 3
    text = verdict(ranks(*others, own), [replace(HOST, busy_s=195.0, capacity_s=200.0)])
    assert text.startswith("Rank 3 on algo-4 waits 62% of the time for the transforms")


def test_a_rank_that_waits_for_another_in_the_forward_pass_is_not_slow():
    """A rank that waits for the buffers of rank 0, which waits for data, is not called slow."""
    main = waiting(62.0, produce_s=60.0, busy_s=38.0, sync_s=36.0)
    other = replace(RANK, busy_s=100.0, sync_s=37.0)
    text = verdict(ranks(main, other), [replace(HOST, busy_s=195.0, capacity_s=200.0)])
    assert text.startswith("Rank 0 on algo-1 waits 62% of the time for the transforms")


def test_a_slow_data_host_is_named():
    """A data host is named if its workers take four times as long per batch as the others."""
    slow = replace(HOST, num_built=20, built_s=16.0)
    text = verdict(ranks(waiting(5.0)), hosts(HOST, slow, HOST))
    assert text.startswith("Training waits 33% of the time because of data host algo-4: a worker takes 800 ms")
    assert "200 ms on the others" in text


def test_a_data_host_with_a_slow_network_is_named():
    """A data host is named if its batches are in transit much longer than the batches of the others."""
    slow = replace(HOST, num_received=10, transfer_s=9.0)
    text = verdict(ranks(waiting(5.0, 4.5)), hosts(HOST, slow))
    assert (
        "because of the network of data host algo-4: its batches spend 900 ms in transit, those of the others 10 ms"
        in text
    )


def test_a_window_that_is_too_small_is_the_last_suspect():
    """A larger window is suggested if neither the workers nor the network are at their limit."""
    assert "Raise data_service.window_batches" in verdict(ranks(waiting(5.0)), hosts(HOST))
    assert "Raise data_service.window_batches" in verdict(ranks(waiting(5.0)), [HostFigures("algo-3")])


def test_a_data_host_that_builds_nothing_is_named():
    """A host that builds nothing is named, rather than the workers of the other host, which build its batches too."""
    silent = replace(HOST, num_built=0, built_s=0.0, num_received=0, transfer_s=0.0, num_hedges=9)
    full = replace(HOST, busy_s=39.0)
    cause = wait_cause(ranks(waiting(5.0)), hosts(full, silent))
    assert cause.name == "data host algo-4"
    assert "it has built no batch, and the others have to build all of them" in cause.text
    assert trouble(hosts(full, silent)) == ["Data host algo-4: built none of 100 batches."]


def test_a_host_that_has_just_started_is_not_silent():
    """A host that has built nothing is not reported while no host has built many batches."""
    new = replace(HOST, num_built=0)
    assert trouble(hosts(new, replace(HOST, num_built=2))) == []


@pytest.mark.parametrize(
    ("state", "words"), [("up", "lost once, and it is back"), ("down", "lost once, and it is down")]
)
def test_a_wait_for_a_data_host_that_was_lost_is_none_for_the_network(state, words):
    """A lost host is named rather than the network: its batches are late because they must be built again."""
    gone = replace(HOST, state=state, num_lost=1, num_retries=4)
    cause = wait_cause(ranks(waiting(90.0, 80.0, transfer_s=150.0)), hosts(HOST, gone))
    assert cause.name == "data host algo-4"
    assert words in cause.text


def test_trouble_is_what_needed_repair():
    """Trouble lists lost connections, repeated requests and hosts that are down; a healthy host is not mentioned."""
    lost = replace(HOST, num_lost=2, num_retries=5)
    gone = replace(HOST, state="down", why="unavailable", num_lost=1, num_retries=1)
    assert trouble(hosts(HOST, lost, gone)) == [
        "Data host algo-4: connection lost 2 times, 5 requests repeated.",
        "Data host algo-5: down (unavailable), connection lost once, 1 request repeated.",
    ]
