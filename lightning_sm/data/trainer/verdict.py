"""The verdict on an epoch: what held up training, if anything did, and what would help. Pure rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from lightning_sm._text import duration, times
from lightning_sm.data.protocol.figures import HostFigures, RankFigures
from lightning_sm.record.bottleneck import NOT_INPUT_BOUND, WORKERS_ARE_BUSY, StepModel, times_as_many

# Waits below this fraction of the epoch, or this many seconds, are not reported.
_MIN_FRACTION = NOT_INPUT_BOUND
_MIN_SECONDS = 1.0
# The first batch of each epoch cannot be requested ahead; only a large part of an epoch matters.
_MIN_FIRST_FRACTION = 0.2
_MIN_FIRST_SECONDS = 5.0
# A host or a rank counts as slower than the others from this factor on.
_SLOWER = 2.0
# The mean of fewer batches says nothing.
_MIN_BATCHES = 3
# The network is the cause if batches were in transit for this part of the waiting.
_TRANSFER_PART = 0.5
# More than this many times the present workers are not recommended.
_MOST_WORKERS = 10


def slowest(ranks: Mapping[str, RankFigures]) -> tuple[str, RankFigures]:
    """Return the rank that waited for data the longest, and its name.

    Args:
        ranks: What each rank measured in the epoch, by name; at least one.
    """
    return max(ranks.items(), key=lambda item: item[1].wait_s)


def verdict(
    ranks: Mapping[str, RankFigures], hosts: Sequence[HostFigures], waiting: RankFigures | None = None
) -> str | None:
    """Return what held up training, and what would help; None if nothing did.

    Args:
        ranks: What each rank measured in the epoch, by name; at least one.
        hosts: What the data hosts did in the epoch.
        waiting: For several epochs, the sum of what the slowest rank of each measured: a rank that waits for data makes
            the others wait in the backward pass, so that ranks which take turns seem to wait less than training does.
            None: one rank is the slowest all the time.
    """
    found = [text for text in (_slow_rank(ranks), _wait(ranks, hosts, waiting)) if text is not None]
    return " ".join(found) or None


def trouble(hosts: Sequence[HostFigures]) -> list[str]:
    """Return a sentence about each data host that was not up all the time, or did not answer all requests.

    Args:
        hosts: What the data hosts did in the epoch.
    """
    sentences = []
    for host in hosts:
        parts = []
        if host.state != "up":
            parts.append(host.state + (f" ({host.why})" if host.why else ""))
        if host.num_lost:
            parts.append(f"connection lost {times(host.num_lost)}")
        if host.num_retries:
            requests = "1 request" if host.num_retries == 1 else f"{host.num_retries} requests"
            parts.append(f"{requests} repeated")
        if parts:
            sentences.append(f"Data host {host.name} in this epoch: {', '.join(parts)}.")
    return sentences


def _slow_rank(ranks: Mapping[str, RankFigures]) -> str | None:
    """Return a sentence about a rank whose own code is so slow that the others wait for it in the backward pass.

    Ranks may wait for each other in the forward pass, too, where DistributedDataParallel sends the buffers of rank 0.
    A rank that seems slow, but no slower than others with their waiting for data, may have waited for these.
    """
    timed = {name: rank for name, rank in ranks.items() if rank.num_timed}
    if len(timed) <= 1:
        return None
    name = max(timed, key=lambda name: timed[name].own_s / timed[name].num_timed)
    rank = timed.pop(name)
    own_s = rank.own_s / rank.num_timed
    others_s = median(other.own_s / other.num_timed for other in timed.values())
    others_with_waits_s = median((other.own_s + other.wait_s) / other.num_timed for other in timed.values())
    extra_s = (own_s - others_with_waits_s) * rank.num_timed
    is_trivial = extra_s < max(_MIN_SECONDS, _MIN_FRACTION * rank.seconds)
    if is_trivial or own_s < _SLOWER * others_with_waits_s:
        return None
    return (
        f"{_capital(name)} holds up the others: apart from the backward pass and the optimizer, its own code takes "
        f"{duration(own_s)} a step, compared with {duration(others_s)} on the others."
    )


def _wait(ranks: Mapping[str, RankFigures], hosts: Sequence[HostFigures], waiting: RankFigures | None) -> str | None:
    """Return why training waited for data; None if it did not."""
    name, rank = slowest(ranks)
    is_one = waiting is None or rank == waiting
    rank = waiting or rank
    if rank.wait_s < _MIN_SECONDS or rank.wait_fraction < _MIN_FRACTION:
        return _first_wait(ranks)
    others_s = max((other.wait_s for key, other in ranks.items() if key != name), default=rank.wait_s)
    who = f"{_capital(name)} waits" if is_one and rank.wait_s >= _SLOWER * others_s else "Training waits"
    who += f" {rank.wait_fraction:.0%} of the time"
    if rank.transfer_wait_s >= _TRANSFER_PART * rank.wait_s:
        return _slow_link(who, hosts) or _network(who, rank)
    return (
        _slow_host(who, hosts)
        or _workers(who, rank, ranks, hosts)
        or (
            f"{who} for data, although the workers of the data hosts are not always busy, and the network is not slow: "
            "some batches take much longer than others, or too few are requested ahead. Raise "
            "data_service.window_batches and data_service.window_bytes."
        )
    )


def _first_wait(ranks: Mapping[str, RankFigures]) -> str | None:
    longest_s, rank = max(((rank.first_wait_s, rank) for rank in ranks.values()), key=lambda pair: pair[0])
    fraction = longest_s / max(1e-9, longest_s + rank.seconds)
    if longest_s < _MIN_FIRST_SECONDS or fraction < _MIN_FIRST_FRACTION:
        return None
    return f"The first batch of the epoch took {duration(longest_s)}, {fraction:.0%} of the epoch."


def _slow_host(who: str, hosts: Sequence[HostFigures]) -> str | None:
    found = _outlier({host.name: host.built_s / host.num_built for host in hosts if host.num_built >= _MIN_BATCHES})
    if found is None:
        return None
    name, own_s, others_s = found
    return (
        f"{who} because of data host {name}: a worker takes {duration(own_s)} for a batch there, and "
        f"{duration(others_s)} on the others. Look at what else it runs, and at its access to the data."
    )


def _slow_link(who: str, hosts: Sequence[HostFigures]) -> str | None:
    received = [host for host in hosts if host.num_received >= _MIN_BATCHES]
    found = _outlier({host.name: host.transfer_s / host.num_received for host in received})
    if found is None:
        return None
    name, own_s, others_s = found
    return (
        f"{who} because of the network of data host {name}: its batches are {duration(own_s)} in transit, those of "
        f"the others {duration(others_s)}."
    )


def _network(who: str, rank: RankFigures) -> str:
    batches = max(1, rank.num_batches)
    latency_s = (rank.queue_s + rank.produce_s + rank.transfer_s) / batches
    megabytes = rank.num_bytes / 1e6
    return (
        f"{who} for the network: of the {duration(latency_s)} from request to batch, "
        f"{duration(rank.transfer_s / batches)} is transfer from the data host ({megabytes / batches:.3g} MB a batch, "
        f"{megabytes / rank.seconds:.3g} MB/s). Make batches smaller (uint8 instead of float32, "
        "data_service.compression), or choose hosts with a faster network."
    )


def _workers(
    who: str, slowest_rank: RankFigures, ranks: Mapping[str, RankFigures], hosts: Sequence[HostFigures]
) -> str | None:
    workers = sum(host.workers for host in hosts if host.state == "up")
    capacity_s = sum(host.capacity_s for host in hosts)
    busy = sum(host.busy_s for host in hosts) / capacity_s if capacity_s else 0.0
    if busy < WORKERS_ARE_BUSY or not workers:
        return None
    # Worker seconds for the batches of one step of all ranks, and an upper bound for a step without waiting for data:
    # in the backward pass, each rank waits for the data of the others, too.
    cost_s = sum(rank.produce_s for rank in ranks.values()) / max(1, slowest_rank.num_steps)
    step_s = min(rank.busy_s / max(1, rank.num_timed) for rank in (slowest_rank, *ranks.values()))
    model = StepModel(step_s, cost_s, workers, busy)
    needed = max(workers + 1, model.workers_needed)
    build_s = slowest_rank.produce_s / max(1, slowest_rank.num_batches)
    owners = "the only worker of the data hosts is" if workers == 1 else f"the {workers} workers of the data hosts are"
    text = f"{who} for the transforms: {owners} busy {busy:.0%} of the time, with {duration(build_s)} for a batch."
    if needed <= _MOST_WORKERS * workers:
        rate = sum(rank.num_bytes for rank in ranks.values()) / max(1, slowest_rank.num_steps) / 1e6
        now_s = slowest_rank.seconds / max(1, slowest_rank.num_timed)
        return (
            f"{text} {times_as_many(needed / workers).capitalize()}, {needed} workers, would remove the wait "
            f"(data_service.workers, more or larger data hosts); the network would then carry {rate / step_s:.3g} MB/s "
            f"instead of {rate / now_s:.3g}."
        )
    rounded = float(f"{needed:.2g}")
    return f"{text} It takes about {rounded:.0f} workers to keep up: make transforms cheaper, or do them beforehand."


def _outlier(means: Mapping[str, float]) -> tuple[str, float, float] | None:
    """Return the name with the largest value, the value, and the median of the others; None if it is not far larger."""
    if len(means) <= 1:
        return None
    name = max(means, key=lambda name: means[name])
    others = median(value for other, value in means.items() if other != name)
    return (name, means[name], others) if means[name] >= _SLOWER * others else None


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]
