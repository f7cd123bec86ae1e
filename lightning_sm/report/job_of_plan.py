"""The job file of a plan: the hosts and workers of its best line."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_sm._text import listed
from lightning_sm.errors import JobConfigError
from lightning_sm.job.instance_types import num_vcpus
from lightning_sm.record.prices import Prices
from lightning_sm.report.figures import Figures
from lightning_sm.report.sizing import Sizing, sentence

_WIDTH = 110
# Where the run had no data hosts: hosts of a group with this name serve data.
_DATA_GROUP = "data"
_NUM_WORKERS = "num_workers"
_OPTION = re.compile(rf"--(?P<name>([\w.]*\.)?{_NUM_WORKERS})=.*", re.ASCII)


def job_of_plan(run: Figures, planned: Sizing, prices: Prices, job: Mapping[str, Any] | None = None) -> str:
    """Return a job file that runs the best line of a plan.

    Args:
        run: The measured run.
        planned: The plan that was made from it.
        prices: Prices of hosts.
        job: The job file of the measured run. Default: what the record says of it; what a job needs besides stands in
            angle brackets, which ``lightning-sm submit`` refuses.

    Raises:
        JobConfigError: The job file describes other hosts than those that were measured.
    """
    import yaml  # noqa: PLC0415 - takes tens of milliseconds, and few commands write a file

    values = dict(job) if job is not None else _recorded(run)
    values["groups"] = groups = _groups(run, planned, values)
    notes = [f"Planned from {run.run.name}.", sentence(planned, prices)]
    command = run.command
    if planned.best.per_rank is not None:
        given = _mapping(values, "hyperparameters")
        names = {name for name in given if name.rpartition(".")[2] == _NUM_WORKERS}
        names |= {found["name"] for word in command if (found := _OPTION.fullmatch(word)) is not None}
        number = planned.best.per_rank
        if names:
            values["hyperparameters"] = {**given, **dict.fromkeys(sorted(names), number)}
            command = tuple(_OPTION.sub(rf"--\g<name>={number}", word) for word in command)
        else:
            notes.append(f"Set {_NUM_WORKERS}={number} in the script: no hyperparameter and no argument has this name.")
    hosts = " ".join(f"--group {name}={group.get('count', 1)}" for name, group in groups.items())
    notes.append(f"On this machine: lightning-sm local {hosts} -- {shlex.join(command or ('train.py',))}")
    head = "\n".join(map(_comment, notes))
    return f"{head}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=_WIDTH)}"


def _recorded(run: Figures) -> dict[str, Any]:
    """Return what the record says of a job."""
    values: dict[str, Any] = {"image": "<image>", "role": "<role>"}
    script = next((word for word in run.command if word.endswith(".py")), None)
    if script is not None:
        values["script"] = script.rpartition("/")[2]
    values["groups"] = {
        group: {"instance_type": kind or "<instance type>", "count": number}
        for (group, kind), number in Counter((host.group, host.instance_type) for host in run.hosts).items()
    }
    if run.hyperparameters:
        values["hyperparameters"] = run.hyperparameters
    return values


def _groups(run: Figures, planned: Sizing, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of a job with as many data hosts as planned."""
    groups = {name: dict(group) for name, group in _mapping(job, "groups").items()}
    measured = Counter((host.group, host.role) for host in run.hosts)
    trainers = {group: number for (group, role), number in measured.items() if role == "trainer"}
    described = {name: groups.get(name, {}).get("count", 1) for name in trainers if name in groups}
    if described != trainers:
        raise JobConfigError(
            f"The job file has other trainer hosts ({_hosts(described)}) than the run that was measured, "
            f"{run.run.name} ({_hosts(trainers)}). Give the job file of that run."
        )
    if planned.best.per_rank is not None:
        return groups
    name = next((group for group, role in measured if role == "data"), _DATA_GROUP)
    group = groups.setdefault(name, {"instance_type": "<instance type>"})
    if planned.kind is not None:
        group["instance_type"] = planned.kind if num_vcpus(planned.kind) else f"<instance type of {planned.kind}>"
    group["count"] = planned.best.num_hosts
    return groups


def _mapping(job: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    values = job.get(key) or {}
    inner = values.values() if key == "groups" and isinstance(values, Mapping) else ()
    if not all(isinstance(one, Mapping) for one in (values, *inner)):
        raise JobConfigError(f"The job file's {key} are {values!r}; expected names with values.")
    return values


def _hosts(groups: Mapping[str, int]) -> str:
    return listed([f"{name}: {number}" for name, number in groups.items()]) or "none"


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
