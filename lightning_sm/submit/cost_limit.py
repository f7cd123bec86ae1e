"""The maximum cost of a job, from its time limit and the user's prices, and the check against ``max_cost``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from lightning_sm._text import count
from lightning_sm.errors import SubmitError
from lightning_sm.record.prices import Prices, cost
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.problems import JobProblem


def cost_problems(job: Job) -> Iterator[JobProblem]:
    """Yield a problem if a job can cost more than ``max_cost``, or if its cost is unknown.

    Args:
        job: The content of the job file.
    """
    if job.max_cost is None:
        return
    why = _why_unknown(job)
    if why is not None:
        yield JobProblem("max_cost", f"max_cost is {job.max_cost:g}, but the job's maximum cost is unknown: {why}.")
    elif _most(job) > job.max_cost:
        yield JobProblem(
            "max_cost",
            f"max_cost is {job.max_cost:g}, but the job can cost {_words(job)}. Lower max_run_s or the number of "
            "hosts, or raise max_cost.",
        )


def confirm_cost(job: Job) -> None:
    """Show the maximum cost of a job, and ask whether to submit it.

    Raises:
        SubmitError: The answer is no, or stdin is not a terminal.
    """
    why = _why_unknown(job)
    text = f"The job can cost {_words(job)}." if why is None else f"The job's maximum cost is unknown: {why}."
    if sys.stdin is None or not sys.stdin.isatty():
        raise SubmitError(f"{text}\nNothing was sent: stdin is not a terminal. Add --yes to submit without a prompt.")
    sys.stderr.write(f"{text}\nSubmit it? [y/N] ")
    sys.stderr.flush()
    try:
        answer = sys.stdin.readline().strip().lower()
    except KeyboardInterrupt:
        sys.stderr.write("\nNothing was sent.\n")
        raise
    if answer not in {"y", "yes"}:
        raise SubmitError("The job was not confirmed; nothing was sent.")


def types_without_price(job: Job) -> list[str]:
    """Return the instance types of a job that have no price."""
    prices = Prices(job.prices)
    types = [group.instance_type for name, group in job.groups.items() if prices.of(name, group.instance_type) is None]
    return list(dict.fromkeys(types))


def _why_unknown(job: Job) -> str | None:
    """Return why a job's maximum cost is unknown; None if it is known."""
    missing = types_without_price(job)
    if job.requested("ResourceConfig.InstancePreferences") is not None:
        return "the service chooses the hosts (InstancePreferences in request)"
    if missing:
        return f"there is no price for {', '.join(missing)}; add a host's hourly price: prices: {{{missing[0]}: 1.41}}"
    if job.tune is not None and job.tune.max_jobs is None:
        return "tune.max_jobs, the number of training jobs, is missing"
    return None


def _words(job: Job) -> str:
    prices = Prices(job.prices)
    hosts = " + ".join(
        f"{group.count} x {group.instance_type} at {prices.amount(prices.of(name, group.instance_type) or 0.0)}"
        for name, group in job.groups.items()
    )
    jobs = "" if job.tune is None else f", for {count(_num_jobs(job), 'training job')}"
    hours = f"{_seconds(job) / 3600:g} h"
    discount = "spot discount, " if job.spot else ""
    return f"{prices.amount(_most(job))} ({hosts} an hour, for {hours}{jobs}; without {discount}storage and transfer)"


def _most(job: Job) -> float:
    """Return the cost of all hosts and jobs up to the time limit, including the time in a warm pool."""
    prices = Prices(job.prices)
    per_hour = sum((prices.of(name, group.instance_type) or 0.0) * group.count for name, group in job.groups.items())
    return _num_jobs(job) * cost(per_hour, _seconds(job))


def _seconds(job: Job) -> int:
    """Return the longest time for which hosts are billed: the time limit, plus the time in a warm pool."""
    kept = job.requested("ResourceConfig.KeepAlivePeriodInSeconds")
    return job.max_run_s + (kept if isinstance(kept, int) else 0)


def _num_jobs(job: Job) -> int:
    return 1 if job.tune is None else job.tune.max_jobs or 1
