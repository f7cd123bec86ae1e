"""The run of all checks, concurrently, each with its own failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from lightning_sm.doctor.checks import folders, gpus, host, job, network, packages, start
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.parallel import in_parallel
from lightning_sm.doctor.report import Result, problem

Check = Callable[[Context], Iterable[Result]]

# In the order of the report.
CHECKS: tuple[Check, ...] = (
    job.facts,
    job.channels,
    job.hyperparameters,
    start.variables,
    start.script,
    network.hosts,
    network.own_port,
    gpus.gpus,
    gpus.torch_cuda,
    gpus.fabric,
    folders.disk,
    folders.writable,
    host.machine,
    host.signals,
    packages.versions,
    packages.requirements,
)


def examine(context: Context, checks: Sequence[Check] = CHECKS) -> list[Result]:
    """Run all checks and return their results in order; a check that fails or hangs is a result, too."""
    # Lists outside the threads, to keep what a check found before it hung.
    found: list[list[Result]] = [[] for _ in checks]

    def run(index: int) -> None:
        for result in checks[index](context):
            found[index].append(result)

    started = time.monotonic()
    outcomes = in_parallel(run, range(len(checks)), context.ends_at - started)
    results: list[Result] = []
    for check, rows, outcome in zip(checks, found, outcomes, strict=True):
        results += list(rows)
        name = check.__name__.replace("_", " ")
        if outcome.error is not None:
            text = f"The check itself failed: {type(outcome.error).__name__}: {outcome.error}"
            results.append(problem(name, text, "Check what the error names. If nothing is wrong there, report a bug."))
        elif outcome.seconds is None:
            text = f"The check did not finish within {context.ends_at - started:.0f} s."
            results.append(problem(name, text, "A file system, device or resolver hangs. --timeout allows more time."))
    return results
