"""The verdict on a run, in sentences: how it ended, what limited it, and what to change."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_sm._text import count, duration, listed
from lightning_sm.data.trainer.verdict import AFTER_A_LOSS, paces, trouble, wait_cause
from lightning_sm.errors import JobConfigError
from lightning_sm.record import limits
from lightning_sm.record.events import FAILED, INTERRUPTED, STOPPED
from lightning_sm.record.limits import JobTimes, Limit, SlowRank, WaitCause
from lightning_sm.record.prices import Prices, cost
from lightning_sm.report.figures import (
    ENDING,
    FIRST_BATCH,
    FRUITLESS,
    PREPARATION,
    RESTARTS,
    RUNNING,
    SAVING,
    STARTUP,
    Figures,
)
from lightning_sm.report.sizing import advice, plan

# By the largest part of the time of restarts: what to change.
_RESTART_CHANGES = {
    SAVING: "Save less in a checkpoint, or to a faster disk.",
    ENDING: "Look at what the script does after an interruption, and at what the host uploads.",
    FRUITLESS: "See in the events why these attempts ended.",
    PREPARATION: "Use an image that has all requirements.",
    STARTUP: "Import less, and look at prepare_data and setup.",
    FIRST_BATCH: "Make the first batch faster: compile less, or look at what the loader's workers do first.",
}
# A data host whose absence covers this part of the waiting is its cause.
_MOST = 0.5


def ending(run: Figures) -> str:
    """Return how the run ended, in a sentence."""
    attempts = "" if len(run.attempts) == 1 else f" in {count(len(run.attempts), 'attempt')}"
    time = f"{duration(run.seconds)}{attempts}"
    if run.outcome == RUNNING:
        return f"The end is not recorded: the job is still running, or its hosts were killed. Recorded so far: {time}."
    how = f"{run.outcome.capitalize()} after {time}"
    if run.outcome == INTERRUPTED:
        return f"{how}: the job can resume from the checkpoint that it saved."
    if run.outcome == STOPPED:
        return f"{how}, without a checkpoint of the last step."
    if run.outcome == FAILED and run.reason.strip():
        # The error and its place.
        return f"{how}: {' '.join(run.reason.splitlines()[:2]).rstrip('.')}."
    return f"{how}."


def headline(run: Figures) -> str:
    """Return what limited the run, and which data hosts had trouble, in a few sentences."""
    times = job_times(run)
    culprit = None if times.cause is None else times.cause.host
    # Of the host for which training waits, the headline has said enough.
    return " ".join([limits.headline(times), *trouble([host for host in run.data[1] if host.name != culprit])])


def scope(run: Figures) -> str:
    """Return which hosts the numbers leave out, in a sentence; empty if they have all of the job.

    A job's own report knows the main host's record, until the other hosts end: of one from the records of all hosts,
    the time of the job and the rank that sets the pace may differ.
    """
    missing, open_ended = run.hosts_without_record, run.hosts_without_end
    said = [f"no record of {listed(missing)}"] if missing else []
    said += [f"no end of that of {listed(open_ended)}"] if open_ended and run.outcome != RUNNING else []
    if not said:
        return ""
    return f"Of {count(len(run.hosts), 'host')}, there is {' and '.join(said)}: numbers from all records may differ."


def changes(run: Figures, prices: Prices) -> list[str]:
    """Return what to change, each with what it costs of the job now, the most first; empty if nothing is worth it."""
    times = job_times(run)
    if times.cause is None or not times.cause.host:  # more workers are no help against a broken host
        times = replace(times, advice=_advice_on_waiting(run, prices))
    found = limits.limits(times)
    first = limits.leading(found, run.seconds)
    # The work of the training itself is there to be done, unless it is what limits the run.
    return [_change(run, limit, prices) for limit in found if limit is first or not limit.is_work]


def price_per_hour(run: Figures, prices: Prices) -> float | None:
    """Return the price of an hour of all hosts, or None if it is not known."""
    return prices.total((host.group, host.instance_type) for host in run.hosts)


def price(run: Figures, prices: Prices) -> float | None:
    """Return what the run cost, or None if the prices are not known."""
    per_hour = price_per_hour(run, prices)
    return None if per_hour is None else cost(per_hour, run.seconds)


def job_times(run: Figures) -> JobTimes:
    """Return what the time of a recorded run went into."""
    return JobTimes(
        seconds=run.seconds,
        num_steps=run.pace.num_steps,
        num_untimed=run.pace.num_untimed,
        parts=run.pace.parts,
        spans=run.spans,
        on_gpu=run.on_gpu,
        cause=_cause(run),
        slow_rank=_slow_rank(run),
        restarts=_restarts(run),
        memory=run.fullest_memory,
    )


def _change(run: Figures, limit: Limit, prices: Prices) -> str:
    whole = price(run, prices)
    costs = limits.cost_of(limit, run.seconds) if limit.seconds else ""
    if costs and whole is not None:
        costs += f", {prices.amount(whole * limit.seconds / run.seconds)}"
    text = f"{limit.name[:1].upper()}{limit.name[1:]}{f', {costs}' if costs else ''}: {limit.finding}"
    return f"{text} {limit.change}".rstrip()


def _advice_on_waiting(run: Figures, prices: Prices) -> str:
    try:
        return advice(plan(run, prices), prices)
    except JobConfigError:  # the run does not say enough; the cause does
        return ""


def _cause(run: Figures) -> WaitCause | None:
    ranks, hosts = run.data
    if ranks:
        waited_s = run.pace.parts["data_wait"]
        name, absent_s = max(run.waits_for_lost_hosts.items(), key=lambda item: item[1], default=("", 0.0))
        if absent_s >= max(1.0, _MOST * waited_s):
            text = f"Training waited {duration(absent_s)} while data host {name} was lost."
            return WaitCause(f"data host {name}", text, AFTER_A_LOSS, name)
        return wait_cause(ranks, hosts, run.longest_waits, share=run.pace.waiting)
    if not run.loaders:
        return None
    loader = next(iter(run.loaders.values()))
    trainers = [host for host in run.hosts if host.role == "trainer" and host.cpu is not None]
    busiest = max(trainers, key=lambda host: host.cpu or 0.0, default=None)
    cpu, cpus = (None, 0) if busiest is None else (busiest.cpu, busiest.cpus)
    return limits.local_wait(run.pace.waiting, loader.workers, cpu, cpus)


def _slow_rank(run: Figures) -> SlowRank | None:
    """Return the rank that holds up the others, from the records of all ranks, or else from what data hosts know."""
    known, (ranks, _) = run.rank_paces, run.data
    return limits.slow_rank(known if len(known) >= len(ranks) else paces(ranks))


def _restarts(run: Figures) -> Limit | None:
    if not run.restarts:
        return None
    apart_s = run.shares[RESTARTS]
    parts = {part: math.fsum(restart.parts[part] for restart in run.restarts) for part in _RESTART_CHANGES}
    part, part_s = max(parts.items(), key=lambda item: item[1])
    steps = sum(restart.num_repeated for restart in run.restarts)
    again_s = steps * run.pace.step_s
    finding = (
        f"Training began {count(len(run.restarts), 'more time')}: {duration(apart_s)} from the end of the training "
        f"before to the next step, the largest part of it {part} ({duration(part_s)})"
    )
    changes = [(part_s, _RESTART_CHANGES[part])]
    if steps:
        finding += f", and {count(steps, 'step')} were trained again ({duration(again_s)})"
        changes.append((again_s, "Save checkpoints more often (every_n_train_steps)."))
    change = " ".join(text for _, text in sorted(changes, reverse=True))
    return Limit(RESTARTS, apart_s + again_s, f"{finding}.", change)
