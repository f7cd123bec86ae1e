"""The job file for a plan, with the hosts and workers of its best line."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_sm.job.hyperparameters import SUBCOMMAND
from lightning_sm.job.redaction import HIDDEN
from lightning_sm.record.prices import Prices
from lightning_sm.report.sizing import Sizing, sentence

_WIDTH = 110
# The group for new data hosts if the run had none; hosts of a group with this name serve data.
_DATA_GROUP = "data"
_OPTION = re.compile(r"--([\w.+]+)=.*", re.ASCII | re.DOTALL)
_NAME = re.compile(r"--[\w.+]+", re.ASCII)
_IS_OPTION = re.compile(r"-[^\d.]")  # unlike a negative number


def job_of_plan(planned: Sizing, prices: Prices) -> str:
    """Return a job file that runs the best line of a plan.

    The file contains what the record says about the job. Other required values are placeholders in angle brackets,
    which ``lightning-sm submit`` rejects.

    Args:
        planned: The plan.
        prices: Prices of hosts.
    """
    import yaml  # noqa: PLC0415 - the import takes tens of milliseconds, and few commands need it

    run = planned.run
    command = _with_joined_options(run.command)
    given: dict[str, Any] = {}
    if command[1:] and SUBCOMMAND.fullmatch(command[1]):
        given["subcommand"] = command[1]
    configs = [word.partition("=")[2] for word in command if _option(word) == "config"]
    given |= {_option(word): word.partition("=")[2] for word in command if _option(word)}
    given |= {"config": configs} if len(configs) > 1 else {}
    given |= run.hyperparameters
    hyperparameters = {name: value for name, value in given.items() if HIDDEN not in value}
    notes = [f"Planned from {run.run.name}.", sentence(planned, prices)]
    left_out = [word for word in command[2 if "subcommand" in given else 1 :] if not _option(word)]
    if left_out:
        notes.append(f"Arguments that cannot be hyperparameters: {shlex.join(left_out)}. Set them in the script.")
    measured, number, option = planned.measured, planned.best.per_rank, "num_workers"
    if number is None:
        number, option = round(planned.best.workers / planned.best.num_hosts), "data_service.workers"
    names = {name for name in given if f".{name}".endswith(f".{option}")}
    if not names and (planned.best.per_rank is not None or number * measured.num_hosts > measured.workers):
        notes.append(f"Set {option}={number} in the script: no hyperparameter or argument has this name.")
    hyperparameters |= dict.fromkeys(names, str(number))
    command = tuple(word if _option(word) not in names else f"--{_option(word)}={number}" for word in command)
    groups = _groups(planned)
    hosts = " ".join(f"--group {name}={group['count']}" for name, group in groups.items())
    notes.append(f"On this machine: lightning-sm local {hosts} -- {shlex.join(command or ('train.py',))}")
    script = next((word for word in run.command if word.endswith(".py")), "<script>").rpartition("/")[2]
    values: dict[str, Any] = {"image": "<image>", "role": "<role>", "script": script, "groups": groups}
    values |= {"hyperparameters": hyperparameters} if hyperparameters else {}
    return "\n".join([*map(_comment, notes), yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=_WIDTH)])


def _with_joined_options(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words with ``--name=value`` in place of ``--name value``."""
    joined: list[str] = []
    for word in words:
        if joined and _NAME.fullmatch(joined[-1]) and not _IS_OPTION.match(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return tuple(joined)


def _option(word: str) -> str:
    """Return the name in ``--name=value``; empty for any other word."""
    match = _OPTION.fullmatch(word)
    return "" if match is None else match[1]


def _groups(planned: Sizing) -> dict[str, Any]:
    """Return the groups of the job, with the planned number of data hosts."""
    measured = Counter((host.group, host.instance_type) for host in planned.run.hosts)
    groups: dict[str, Any] = {
        group: {"instance_type": kind or "<instance type>", "count": number}
        for (group, kind), number in measured.items()
    }
    if planned.best.num_hosts:
        name = next((host.group for host in planned.run.hosts if host.role == "data"), _DATA_GROUP)
        group = groups.setdefault(name, {"instance_type": "<instance type>"})
        group |= {} if planned.best.kind is None else {"instance_type": planned.best.kind}
        group["count"] = planned.best.num_hosts
    return groups


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
