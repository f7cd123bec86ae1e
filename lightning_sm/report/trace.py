"""The timeline of a run for Perfetto (https://ui.perfetto.dev), in Chrome's trace event format.

Each process with a record becomes a process in Perfetto. All times are relative to the start of the run, by the clock
of the process's host. Rank 0's figures about data hosts have separate tracks, even for data hosts without a record. The
format is described in https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_sm._text import count
from lightning_sm.record.events import DataService, End, Event, HostUse, Span, Steps
from lightning_sm.record.runs import ProcessRecord
from lightning_sm.report.figures import Figures

# Track numbers within a process.
_STEPS, _SPANS = 1, 2


def trace(runs: Sequence[Figures]) -> str:
    """Return the timeline of runs as JSON. Each run begins at 0.

    Args:
        runs: One or more runs. If there are several, each process name begins with the name of its run.
    """
    events: list[dict[str, Any]] = []
    pids: dict[tuple[str, str], int] = {}
    for run in runs:
        for record in run.run.records:
            prefix = f"{run.run.name}: " if len(runs) > 1 else ""
            name = (prefix, f"{record.head.host} {record.head.who}")
            if name not in pids:
                pids[name] = len(pids) + 1
                events += _names(pids[name], "".join(name))
            events += _of_process(record, pids[name], run.begin)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _names(pid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for tid, track in ((_STEPS, "steps"), (_SPANS, "outside the steps")):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}


def _of_process(record: ProcessRecord, pid: int, begin: float) -> Iterator[dict[str, Any]]:
    def event(kind: str, t: float, name: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
        at = round(1e6 * (t - begin), 1)
        return {"ph": kind, "pid": pid, "ts": at, "name": name.replace("_", " "), "args": args, **more}

    for line in record.lines:
        match line:
            case Steps(n=n) if n:
                parts = {part: round(1e3 * seconds / n, 3) for part, seconds in line.parts.items()}
                began = line.t - line.wall_s
                name = f"{count(n, 'step')} to {line.step}"
                yield event("X", began, name, {"ms of a step": parts}, tid=_STEPS, dur=round(1e6 * line.wall_s, 1))
                yield event("C", began, "ms of a step", parts)
            case Span():
                micros = round(1e6 * max(0.0, line.t - line.begin), 1)
                yield event("X", line.begin, line.name, {"own seconds": line.seconds}, tid=_SPANS, dur=micros)
            case HostUse():
                gpus = {f"GPU {number}": 100 * gpu.use for number, gpu in enumerate(line.gpus)}
                yield event("C", line.t, "% in use", {"CPUs": 100 * line.cpu, **gpus})
                yield event("C", line.t, "memory (GB)", {"host": line.memory_bytes / 1e9})
            case Event():
                yield event("i", line.t, line.what, {"what": line.text}, s="p", tid=_SPANS)
            case End():
                yield event("i", line.t, line.outcome, {"what": line.reason}, s="p", tid=_SPANS)
            case DataService():
                for host in line.hosts:
                    name = f"batches of data host {host['name']}"
                    yield event("C", line.t, name, {"built": host.get("num_built", 0)})
