"""The reasons why training waits for data hosts, and their remedies. Pure logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from lightning_sm._text import count, duration, percent, size, times
from lightning_sm.record.data_figures import HostFigures, RankFigures
from lightning_sm.record.thresholds import NOT_INPUT_BOUND, WORKERS_ARE_BUSY, RankPace, WaitCause, slow_rank

# Do not report waits below this fraction of the epoch or this many seconds.
_MIN_FRACTION = NOT_INPUT_BOUND
_MIN_SECONDS = 1.0
# A host or rank that takes this many times as long as the others is slow.
_SLOWER = 2.0
# A mean over fewer batches than this is not meaningful.
_MIN_BATCHES = 3
# Blame the network if batches were in transit for at least this fraction of the wait. Blame the workers only if their
# measured capacity covers at least this fraction of the wait.
_EXPLAINED_PART = 0.5
_AFTER_A_LOSS = "Check the end of its log. With a second data host, training would have continued."


def verdict(ranks: Mapping[str, RankFigures], hosts: Sequence[HostFigures]) -> str:
    """Return what held up training and what would help; empty if nothing held it up.

    Args:
        ranks: Each rank's figures for the epoch, by name.
        hosts: The data hosts' figures for the epoch.
    """
    slow, cause = slow_rank(paces(ranks)), wait_cause(ranks, hosts)
    sentences = [] if slow is None else [slow.text]
    sentences += [] if cause is None else [cause.text, cause.change]
    return " ".join(filter(None, sentences))


def paces(ranks: Mapping[str, RankFigures]) -> list[RankPace]:
    """Return the pace of each rank, with and without waits for other ranks.

    Args:
        ranks: Each rank's figures, by name.
    """
    return [
        RankPace(name, n, rank.seconds / n, rank.own_s / n, rank.wait_s / n)
        for name, rank in ranks.items()
        if (n := rank.num_timed)
    ]


def trouble(hosts: Sequence[HostFigures]) -> list[str]:
    """Return a sentence about each host that is not up, lost its connection, caused retries or built no batches.

    Args:
        hosts: The data hosts' figures for the epoch.
    """
    sentences = []
    for host in hosts:
        parts = []
        if host.state != "up":
            parts.append(host.state + (f" ({host.why})" if host.why else ""))
        if host.num_lost:
            parts.append(f"connection lost {times(host.num_lost)}")
        if host.num_retries:
            parts.append(f"{count(host.num_retries, 'request')} repeated")
        if _is_silent(host, hosts):
            built = sum(other.num_built for other in hosts)
            parts.append(f"built none of {count(built, 'batch', 'batches')}")
        if parts:
            sentences.append(f"Data host {host.name}: {', '.join(parts)}.")
    return sentences


def wait_cause(
    ranks: Mapping[str, RankFigures], hosts: Sequence[HostFigures], share: float | None = None
) -> WaitCause | None:
    """Return why training waited for data, or None if it hardly waited.

    Args:
        ranks: Each rank's figures, by name.
        hosts: The data hosts' figures.
        share: Share of the time that training waited, according to the step clock. Defaults to the figures' share.
    """
    name, rank = max(ranks.items(), key=lambda item: item[1].wait_s, default=("", RankFigures()))
    if rank.wait_s < _MIN_SECONDS or rank.wait_fraction < _MIN_FRACTION:
        return None
    others_s = max((other.wait_s for key, other in ranks.items() if key != name), default=rank.wait_s)
    who = f"{name[:1].upper()}{name[1:]} waits" if rank.wait_s >= _SLOWER * others_s else "Training waits"
    who += f" {percent(rank.wait_fraction if share is None else share)} of the time"
    if rank.transfer_wait_s >= _EXPLAINED_PART * rank.wait_s:
        # Check for a lost host first: its batches arrive late, too.
        return _lost_host(who, hosts) or _slow_link(who, hosts) or _network(who, rank)
    unsteady = (
        f"{who} for data, although the workers of the data hosts are not always busy, and the network is not slow: "
        "some batches take much longer than others, or too few are requested ahead."
    )
    return (
        _silent_host(who, hosts)
        or _slow_host(who, hosts)
        or _workers(who, rank, hosts)
        or _lost_host(who, hosts)
        or WaitCause("batches that vary", unsteady, "Raise data_service.window_batches and data_service.window_bytes.")
    )


def _is_silent(host: HostFigures, hosts: Sequence[HostFigures]) -> bool:
    """Return whether a host was up but built no batches while another host did."""
    others = max((other.num_built for other in hosts if other is not host), default=0)
    return host.state == "up" and host.num_built == 0 and others >= _MIN_BATCHES


def _silent_host(who: str, hosts: Sequence[HostFigures]) -> WaitCause | None:
    silent = next((host for host in hosts if _is_silent(host, hosts)), None)
    if silent is None:
        return None
    text = f"{who} because of data host {silent.name}: it has built no batch, and the others have to build all of them."
    return WaitCause(f"data host {silent.name}", text, "Check its log and its access to the data.", silent.name)


def _lost_host(who: str, hosts: Sequence[HostFigures]) -> WaitCause | None:
    lost = max(hosts, key=lambda host: (host.num_lost, host.state != "up"), default=None)
    if lost is None or (not lost.num_lost and lost.state == "up"):
        return None
    state, lost_times = "back" if lost.state == "up" else lost.state, times(max(1, lost.num_lost))
    text = f"{who} because of data host {lost.name}: its connection was lost {lost_times}, and it is {state}."
    return WaitCause(f"data host {lost.name}", text, _AFTER_A_LOSS, lost.name)


def _slow_host(who: str, hosts: Sequence[HostFigures]) -> WaitCause | None:
    slowest = _outlier({host.name: host.built_s / host.num_built for host in hosts if host.num_built >= _MIN_BATCHES})
    if slowest is None:
        return None
    name, own_s, others_s = slowest
    text = (
        f"{who} because of data host {name}: a worker takes {duration(own_s)} per batch there, and "
        f"{duration(others_s)} on the others."
    )
    change = "Check what else it runs, and its access to the data."
    return WaitCause(f"data host {name}", text, change, name)


def _slow_link(who: str, hosts: Sequence[HostFigures]) -> WaitCause | None:
    received = [host for host in hosts if host.num_received >= _MIN_BATCHES]
    slowest = _outlier({host.name: host.transfer_s / host.num_received for host in received})
    if slowest is None:
        return None
    name, own_s, others_s = slowest
    text = (
        f"{who} because of the network of data host {name}: its batches spend {duration(own_s)} in transit, those "
        f"of the others {duration(others_s)}."
    )
    return WaitCause(f"network of data host {name}", text, host=name)


def _network(who: str, rank: RankFigures) -> WaitCause:
    batches = max(1, rank.num_batches)
    latency_s = (rank.queue_s + rank.produce_s + rank.transfer_s) / batches
    text = (
        f"{who} for the network: of the {duration(latency_s)} from request to batch, "
        f"{duration(rank.transfer_s / batches)} is transfer from the data host ({size(rank.num_bytes / batches)} a "
        f"batch, {size(rank.num_bytes / rank.seconds)}/s on average)."
    )
    change = "Make batches smaller (uint8 instead of float32), or choose hosts with a faster network."
    return WaitCause("network", text, change)


def _workers(who: str, rank: RankFigures, hosts: Sequence[HostFigures]) -> WaitCause | None:
    workers = sum(host.workers for host in hosts if host.state == "up")
    capacity_s = sum(host.capacity_s for host in hosts)
    busy = sum(host.busy_s for host in hosts) / capacity_s if capacity_s else 0.0
    # Require enough measured capacity: a lost host may have been back only for a moment.
    if busy < WORKERS_ARE_BUSY or not workers or capacity_s < _EXPLAINED_PART * rank.wait_s * workers:
        return None
    build_s = rank.produce_s / max(1, rank.num_batches)
    owners = "the only worker of the data hosts is" if workers == 1 else f"the {workers} workers of the data hosts are"
    text = f"{who} for the transforms: {owners} busy {percent(busy)} of the time, at {duration(build_s)} per batch."
    change = (
        "Make the transforms cheaper, or use more workers (data_service.workers, more or larger data hosts); "
        "lightning-sm plan calculates how many."
    )
    return WaitCause("transforms", text, change, is_building=True)


def _outlier(means: Mapping[str, float]) -> tuple[str, float, float] | None:
    """Return the largest value with its name and the others' median; None if no value is far above the others."""
    if len(means) <= 1:
        return None
    name = max(means, key=lambda name: means[name])
    others = median(value for other, value in means.items() if other != name)
    return (name, means[name], others) if means[name] >= _SLOWER * others else None
