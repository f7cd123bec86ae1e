"""The verdict on a run in sentences: its outcome, what limited it, and what to change."""

from __future__ import annotations

from lightning_sm._text import count, duration, listed, percent
from lightning_sm.errors import JobConfigError
from lightning_sm.record.events import FAILED, INTERRUPTED, STOPPED
from lightning_sm.record.prices import Prices, cost
from lightning_sm.record.thresholds import MIN_STEPS
from lightning_sm.record.waiting_reasons import trouble
from lightning_sm.report.figures import RUNNING, Figures
from lightning_sm.report.limits import Limit, cause_of_wait, leading, limits
from lightning_sm.report.sizing import advice, plan

_RESUMES = ": the job can resume from the checkpoint that it saved"


def ending(run: Figures) -> str:
    """Return sentences about the outcome of a run, hosts whose end is not recorded, and flaws in the record."""
    attempts = "" if len(run.attempts) == 1 else f" in {count(len(run.attempts), 'attempt')}"
    time = f"{duration(run.seconds)}{attempts}"
    gone = run.hosts_without_end
    if run.outcome == RUNNING:
        said = f"The end was not recorded: the job is still running, or its hosts were killed. Recorded so far: {time}."
    else:
        why = run.attempts[-1].reason.rstrip(".") if run.outcome == FAILED else ""
        meaning = _RESUMES if run.outcome == INTERRUPTED else why and f": {why}"
        said = f"{run.outcome.capitalize()} after {time}{meaning}."
        said += f" {_last_checkpoint(run)}" if run.outcome == STOPPED else ""
        said += f" The end of {listed(gone)} was not recorded: killed or still running." if gone else ""
    return f"{said} {run.run.flaws}".rstrip()


def _last_checkpoint(run: Figures) -> str:
    saved = [event for event in run.events if event.what == "checkpoint_saved"]
    return f"Last checkpoint: {saved[-1].text}." if saved else "No checkpoint was saved."


def headline(run: Figures) -> str:
    """Return a few sentences about the largest limit of a run, and data hosts that had trouble."""
    cause = cause_of_wait(run) if run.pace.num_steps else None
    # Skip the host for which training waits: the limit already names it.
    troubled = [host for host in run.data[1] if cause is None or host.name != cause.host]
    return " ".join([_largest(run), *trouble(troubled)])


def _largest(run: Figures) -> str:
    if run.pace.num_trained == 0:
        return "No training step is recorded."
    if run.pace.num_trained < MIN_STEPS:
        return f"{count(run.pace.num_trained, 'step')}: too few for a verdict, which needs {MIN_STEPS}."
    limit = leading(limits(run), run.seconds)
    if limit is None:
        return "No avoidable cost takes a large part of the time."
    share = f", {_cost(run, limit)}" if limit.seconds else ""
    return f"Limited by {limit.name}{share}. {limit.finding}".rstrip()


def changes(run: Figures, prices: Prices) -> list[str]:
    """Return the changes worth making, each with the current cost of its limit, largest cost first."""
    try:
        advice_on_waiting = advice(plan(run, prices), prices)
    except JobConfigError:  # the run lacks data for a plan; use the cause's own advice
        advice_on_waiting = ""
    found = limits(run, advice_on_waiting)
    first = leading(found, run.seconds)
    # The parts of a step that train the model are necessary work, so list one only if it is the leading limit.
    return [_change(run, limit, prices) for limit in found if limit is first or not limit.is_work]


def price(run: Figures, prices: Prices) -> float | None:
    """Return the cost of a run; None if prices are unknown."""
    per_hour = prices.total(run.kinds)
    return None if per_hour is None else cost(per_hour, run.seconds)


def _change(run: Figures, limit: Limit, prices: Prices) -> str:
    whole = price(run, prices)
    costs = f", {_cost(run, limit)}" if limit.seconds else ""
    if costs and whole is not None:
        costs += f", {prices.amount(whole * limit.seconds / run.seconds)}"
    return f"{limit.name[:1].upper()}{limit.name[1:]}{costs}: {limit.finding} {limit.change}".rstrip()


def _cost(run: Figures, limit: Limit) -> str:
    return f"{percent(limit.seconds / max(1e-9, run.seconds))} of the job ({duration(limit.seconds)})"
