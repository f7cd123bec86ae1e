"""Records of invented runs, in the format that a job writes."""

from __future__ import annotations

from pathlib import Path

from lightning_sm.record.events import (
    FOLDER,
    DataService,
    End,
    Event,
    FileHead,
    HostUse,
    Line,
    Loader,
    Metrics,
    Recorder,
    Span,
    Steps,
)

BEGIN = 1_700_000_000.0
HOSTS = {"algo-1": "trainer", "algo-2": "data"}
TYPES = {"trainer": "ml.g5.xlarge", "data": "ml.c5.xlarge"}
PARTS = {"data_wait": 0.58, "to_device": 0.02, "forward": 0.1, "backward": 0.2, "optimizer": 0.05, "other": 0.05}


def write(folder: Path, *lines: Line, host: str = "algo-1", who: str = "rank-0", attempt: int = 1) -> Path:
    """Append lines to the file of a process, and return its path."""
    path = folder / FOLDER / str(attempt) / f"{host}-{who}.jsonl"
    recorder = Recorder(path)
    for line in lines:
        recorder.append(line)
    recorder.close()
    return path


def head(t: float = 0.0, host: str = "algo-1", who: str = "rank-0", **values: object) -> FileHead:
    """Return the first line of a file."""
    rank = int(who.partition("-")[2]) if who.startswith("rank") else None
    known = {
        "job": "job",
        "group": HOSTS[host],
        "role": HOSTS[host],
        "rank": rank,
        "world_size": None if rank is None else 1,
        "hosts": HOSTS,
        "instance_types": TYPES,
        "cpus": 4 if HOSTS[host] == "trainer" else 3,
        "command": () if rank is not None else ("train.py", "--lr=0.1"),
    }
    return FileHead(BEGIN + t, host, who, **(known | values))  # type: ignore[arg-type]


def steps(
    t: float, n: int = 20, step_s: float = 0.05, waiting: float = 0.58, step: int = 0, samples: int = 640
) -> Steps:
    """Return steps that wait for data for a share of their time; the rest is distributed as in ``PARTS``."""
    wall_s = n * step_s
    rest = {part: share for part, share in PARTS.items() if part != "data_wait"}
    scale = (1.0 - waiting) / sum(rest.values())
    parts = {"data_wait": waiting * wall_s} | {part: share * scale * wall_s for part, share in rest.items()}
    return Steps(BEGIN + t, step, n, samples, parts)


def use(t: float, cpu: float = 0.4) -> HostUse:
    """Return one measurement of a host."""
    return HostUse(BEGIN + t, cpu, 2 * 10**9, 16 * 10**9)


def data(
    t: float,
    num_steps: int,
    *,
    workers: int = 2,
    produce_s: float = 0.096,
    busy: float = 1.0,
    num_bytes: int = 1_000_000,
    transfer_s: float = 0.0005,
) -> DataService:
    """Return the figures of a data host and rank 0 since the start, at 50 ms per step."""
    seconds = 0.05 * num_steps
    rank = {
        "num_batches": num_steps,
        "num_steps": num_steps,
        "num_timed": num_steps,
        "num_bytes": num_bytes * num_steps,
        "wait_s": 0.58 * seconds,
        "transfer_wait_s": 0.0,
        "busy_s": 0.42 * seconds,
        "sync_s": 0.2 * seconds,
        "queue_s": 0.1 * seconds,
        "produce_s": produce_s * num_steps,
        "transfer_s": transfer_s * num_steps,
    }
    host = {
        "name": "algo-2",
        "state": "up",
        "why": "",
        "workers": workers,
        "busy_s": busy * workers * seconds,
        "capacity_s": workers * seconds,
        "num_built": num_steps,
        "built_s": produce_s * num_steps,
        "num_received": num_steps,
        "transfer_s": 0.01 * seconds,
        "num_retries": 0,
        "num_lost": 0,
    }
    return DataService(BEGIN + t, [host], {"rank 0": rank})


def input_bound(
    folder: Path,
    *,
    seconds: int = 60,
    outcome: str = "succeeded",
    attempt: int = 1,
    begin: float = 0.0,
    **of_data: float,
) -> Path:
    """Write a run whose data host has too few workers: its trainer waits for 58% of each 50 ms step."""
    end = begin + 10 + seconds + 2
    rank: list[Line] = [
        head(begin + 1),
        Loader(BEGIN + begin + 6, cpus=4),
        Span(BEGIN + begin + 6, "startup", BEGIN + begin + 1, 5.0),
        Span(BEGIN + begin + 10, "first_batch", BEGIN + begin + 6, 4.0),
    ]
    for second in range(1, seconds + 1):
        rank.append(steps(begin + 10 + second, step=20 * second))
        if second % 5 == 0:
            rank.append(data(begin + 10 + second, 20 * second, **of_data))  # type: ignore[arg-type]
            rank.append(Metrics(BEGIN + begin + 10 + second, 20 * second, 0, {"train_loss": 2.0 / second}))
    rank.append(Metrics(BEGIN + begin + 10 + seconds, 20 * seconds, 0, {"val_acc": 0.9}))
    rank.append(Span(BEGIN + end - 1, "validation", BEGIN + end - 2, 1.0))
    rank.append(End(BEGIN + end - 1, outcome))
    write(folder, *rank, attempt=attempt)
    reason = "" if outcome == "succeeded" else "ValueError: <b>$x$</b> & so on"
    code = {"succeeded": 0, "interrupted": 143}.get(outcome, 1)
    for host in HOSTS:
        lines: list[Line] = [head(begin, host, "launcher")]
        lines += [use(begin + second, 0.2 if host == "algo-1" else 0.9) for second in range(5, seconds + 10, 5)]
        if outcome != "succeeded" and host == "algo-1":
            lines.append(Event(BEGIN + end - 3, "signal", "SIGTERM arrived."))
        lines.append(
            End(BEGIN + end, outcome if host == "algo-1" else "succeeded", code if host == "algo-1" else 0, reason)
        )
        write(folder, *lines, host=host, who="launcher", attempt=attempt)
    return folder
