"""The loop that shows a job at intervals: in place in a terminal, one table below the other elsewhere."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue

from rich.console import Console
from rich.live import Live

from lightning_sm._log import command_logger
from lightning_sm._text import listed
from lightning_sm.top.running import RunningHost, running_jobs
from lightning_sm.top.screen import frame
from lightning_sm.top.snapshot import Snapshot, Watch

_LOG = command_logger(__name__)

_LIVE_S, _PLAIN_S = 1.0, 10.0
# Rates need two snapshots.
_FIRST_S = 1.0
# Between two attempts, the emulator has no processes of the job for a moment.
_GONE_S = 3.0


def watch(name: str | None, *, every_s: float | None, is_once: bool, is_json: bool) -> int:
    """Show a job until it ends or Ctrl-C is pressed.

    Args:
        name: Name of the job, or the end of it; None: the newest.
        every_s: Seconds between two looks; None: what suits the terminal.
        is_once: Whether to show it once.
        is_json: Whether to write JSON.

    Returns:
        0, or 1 if no such job runs here.
    """
    console = Console()
    jobs = running_jobs()
    chosen = _choose(jobs, name)
    if chosen is None:
        if jobs and name:
            _LOG.error("No job on this machine is called %s; running: %s.", name, listed(list(jobs)))
        else:
            _LOG.error(
                "No job runs on this machine. Start one with lightning-sm local; for a job in the cloud: "
                "lightning-sm jobs logs -f NAME."
            )
        return 1
    is_live = console.is_terminal and not console.is_dumb_terminal and not (is_once or is_json)
    with Watch(chosen) as looking, ExitStack() as stack:
        show: Callable[[Snapshot], None]
        if is_json:
            show = _write_json
        elif is_live:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False, transient=False))
            show = lambda shown: live.update(frame(shown, *console.size), refresh=True)  # noqa: E731
        else:
            show = lambda shown: console.print(frame(shown, console.width))  # noqa: E731
        pause = stack.enter_context(_pauses())
        every_s = every_s or (_LIVE_S if is_live else _PLAIN_S)
        last, was_left = _run(looking, chosen, show, pause=pause, every_s=every_s, is_once=is_once)
    if was_left:
        return 0
    if last is not None and is_live:  # leaving the live screen has erased what it showed
        console.print(frame(last, console.width))
    if not is_once:
        _LOG.info("Job %s has ended, or its processes are gone.", chosen)
    return 0


@contextmanager
def _pauses() -> Iterator[Callable[[float], bool]]:
    """Yield a pause, in seconds, which Ctrl-C ends; it returns whether Ctrl-C was pressed since the beginning.

    As an exception Ctrl-C could come anywhere, also where gRPC and rich do not expect it: once the exit code was 1.
    """
    presses: SimpleQueue[int] = SimpleQueue()  # a signal handler may add to it, whatever it has interrupted

    def pause(seconds: float) -> bool:
        with suppress(Empty):
            presses.put(presses.get(timeout=seconds))
        return not presses.empty()

    before = signal.signal(signal.SIGINT, lambda number, _: presses.put(number))
    try:
        yield pause
    finally:
        signal.signal(signal.SIGINT, before)


def _run(
    looking: Watch,
    name: str,
    show: Callable[[Snapshot], None],
    *,
    pause: Callable[[float], bool],
    every_s: float,
    is_once: bool,
) -> tuple[Snapshot | None, bool]:
    """Take snapshots until the job ends or Ctrl-C is pressed; return the last one, and whether it was Ctrl-C.

    The first one is shown only if there is no other: rates need two.
    """
    last, has_shown, seen_at = None, False, time.monotonic()
    while True:
        jobs = running_jobs()
        if name in jobs:
            is_first, seen_at = last is None, time.monotonic()
            last = looking.look(jobs[name], [other for other in jobs if other != name])
            if not is_first:
                show(last)
                has_shown = True
                if is_once:
                    return last, False
        elif time.monotonic() - seen_at > _GONE_S:
            if last is not None and not has_shown:
                show(last)
            return last, False
        if pause(every_s if has_shown and name in jobs else _FIRST_S):
            return last, True


def _choose(jobs: Mapping[str, Sequence[RunningHost]], name: str | None) -> str | None:
    fitting = [job for job in jobs if name is None or job == name or job.endswith(name)]
    return fitting[-1] if fitting else None


def _write_json(shown: Snapshot) -> None:
    sys.stdout.write(json.dumps(asdict(shown)) + "\n")
    sys.stdout.flush()
