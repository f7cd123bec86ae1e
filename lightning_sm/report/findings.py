"""The findings about a run, in sentences: the verdict, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_sm._text import count, duration, percent, step_time
from lightning_sm.data.trainer.verdict import trouble, verdict
from lightning_sm.errors import JobConfigError
from lightning_sm.record.bottleneck import NOT_INPUT_BOUND, local_verdict
from lightning_sm.record.prices import Prices, cost
from lightning_sm.report.figures import RUNNING, Figures
from lightning_sm.report.sizing import plan, sentence

# Less than this share of the job is not worth a change.
_WORTH = 0.2


def ending(run: Figures) -> str:
    """Return how the run ended, in a sentence."""
    attempts = "" if len(run.attempts) == 1 else f" in {count(len(run.attempts), 'attempt')}"
    time = f"{duration(run.seconds)}{attempts}"
    if run.outcome == RUNNING:
        return f"The end is not recorded: the job is still running, or its hosts were killed. Recorded so far: {time}."
    # The reason of an interruption only says that there was one.
    has_reason = run.outcome == "failed" and run.reason.strip()
    reason = f": {run.reason.splitlines()[0].rstrip('.')}" if has_reason else ""
    return f"{run.outcome.capitalize()} after {time}{reason}."


def bottleneck(run: Figures) -> str:
    """Return what held up the training, in a sentence or two."""
    if run.slowest.n == 0:
        return "No training step is recorded."
    waiting = run.slowest.waiting
    ranks, hosts = run.data
    if ranks:
        text = verdict(ranks, hosts) or ""
    elif run.loaders:
        loader = next(iter(run.loaders.values()))
        trainers = [host for host in run.hosts if host.role == "trainer" and host.cpu is not None]
        busiest = max(trainers, key=lambda host: host.cpu or 0.0, default=None)
        text = local_verdict(
            waiting,
            loader.workers,
            None if busiest is None else busiest.cpu,
            0 if busiest is None else busiest.cpus,
        )
    else:
        text = ""
    if text:
        return text
    if waiting >= NOT_INPUT_BOUND:
        return f"Input-bound: training waits {percent(waiting)} of the time for data."
    return f"Not input-bound: a step takes {step_time(run.slowest.step_s)}, {percent(waiting)} of it waiting for data."


def advice(run: Figures, prices: Prices) -> list[str]:
    """Return what to change, each with what it would bring; empty if nothing is worth a change."""
    return list(_advice(run, prices))


def price_per_hour(run: Figures, prices: Prices) -> float | None:
    """Return the price of an hour of all hosts, or None if it is not known."""
    return prices.total((host.group, host.instance_type) for host in run.hosts)


def price(run: Figures, prices: Prices) -> float | None:
    """Return what the run cost, or None if the prices are not known."""
    per_hour = price_per_hour(run, prices)
    return None if per_hour is None else cost(per_hour, run.seconds)


def _advice(run: Figures, prices: Prices) -> Iterator[str]:
    if run.slowest.n and run.slowest.waiting >= NOT_INPUT_BOUND:
        try:
            planned = plan(run, prices)
        except JobConfigError:  # the run does not say enough; the verdict does
            pass
        else:
            yield sentence(planned, prices)
    yield from trouble(run.data[1])
    for name, parts, text in (
        (
            "Start-up",
            ("start-up", "first batch"),
            "matters less in a longer job; an image with all requirements is faster",
        ),
        ("Validation", ("validation",), "validate less often (check_val_every_n_epoch), or on less data"),
        ("Saving checkpoints", ("checkpoints",), "save less often, or less"),
    ):
        seconds = sum(run.shares[part] for part in parts)
        if run.slowest.n and seconds >= _WORTH * run.seconds:
            whole = price(run, prices)
            amount = "" if whole is None else f" and {prices.amount(whole * seconds / run.seconds)}"
            yield f"{name} took {duration(seconds)}{amount}, {percent(seconds / run.seconds)} of the job: {text}."
