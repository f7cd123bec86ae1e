"""The view of a snapshot of a job in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_sm._text import count, duration, percent, plain, rate, shortened, size
from lightning_sm.record import events
from lightning_sm.top import snapshot
from lightning_sm.top.snapshot import EventRow, HostRow, Snapshot

# A state has a word and a sign; colour only repeats them.
_SIGNS = {
    snapshot.STARTING: ("~", "yellow"),
    snapshot.IDLE: (".", "cyan"),
    snapshot.SILENT: ("!", "bold red"),
    snapshot.NO_ANSWER: ("!", "bold red"),
    events.SUCCEEDED: ("=", "green"),
    events.FAILED: ("x", "bold red"),
    events.INTERRUPTED: ("-", "yellow"),
    events.STOPPED: ("-", "yellow"),
    snapshot.ELSEWHERE: ("?", "dim"),
}
_WORKING = ("+", "green")
_BAD = "!x"
_MAX_EVENTS = 6
_MAX_METRICS = 5
# Lines besides the hosts: two of the head, metrics, the table's head, the line for hosts that do not fit.
_OTHER_LINES = 6
_MIN_HOSTS = 3
_MAX_STATE_CELLS = 24


@dataclass(frozen=True)
class _Column:
    """A column of the table.

    Attributes:
        title: Its title.
        text: What it says of a host; empty where nothing is known.
        rank: Columns of a higher rank are left out first where the terminal is narrow.
        is_number: Whether it is aligned to the right.
    """

    title: str
    text: Callable[[HostRow], str]
    rank: int
    is_number: bool = True


def frame(shown: Snapshot, width: int, height: int | None = None) -> RenderableType:
    """Return the view of a snapshot.

    Args:
        shown: The snapshot.
        width: Cells of a line.
        height: Lines of the terminal, where it must fit; None: any number.
    """
    newest = shown.events[-_MAX_EVENTS:]
    notes = [row for row in shown.hosts if row.note]
    rows = list(shown.hosts)
    num_hidden = 0
    if height is not None:
        room = max(_MIN_HOSTS, height - _OTHER_LINES - len(notes) - len(newest) - bool(newest))
        num_hidden = max(0, len(rows) - room)
        # Those with a problem first; the others keep their order.
        rows = sorted(rows, key=lambda row: _sign(row)[0] not in _BAD)[:room] if num_hidden else rows
    parts: list[RenderableType] = [*_head(shown), _table(rows, width)]
    if num_hidden:
        parts.append(_line(f"and {count(num_hidden, 'more host')}", "dim"))
    parts += [_line(f"{_sign(row)[0]} {row.host}: {row.note}") for row in notes]
    if newest:
        parts.append(_line("events (UTC)", "bold"))
        parts += map(_event, newest)
    return Group(*parts)


def _head(shown: Snapshot) -> Iterator[Text]:
    attempt = f", attempt {shown.attempt}" if shown.attempt > 1 else ""
    others = f"; also running here: {', '.join(shown.others)}" if shown.others else ""
    yield _line(f"job {shown.job}{attempt}, running for {duration(shown.seconds)}{others}", "bold")
    facts = []
    if shown.epoch is not None and shown.step is not None:
        facts.append(f"epoch {shown.epoch}, step {shown.step:,}")
    if shown.steps_per_s is not None:
        facts.append(f"{rate(shown.steps_per_s)} steps/s")
    if shown.samples_per_s is not None:
        facts.append(f"{rate(shown.samples_per_s)} samples/s")
    if shown.wait_share is not None:
        facts.append(f"waiting for data {percent(shown.wait_share)} of the time")
    yield _line("   ".join(facts) or "no training step yet")
    values = [(name, value) for name, value in shown.metrics.items() if value is not None][:_MAX_METRICS]
    if values:
        yield _line("   ".join(f"{name} {value:.4g}" for name, value in values))


def _sign(row: HostRow) -> tuple[str, str]:
    return _SIGNS.get(row.state, _WORKING)


def _state(row: HostRow) -> str:
    text = f"{_sign(row)[0]} {plain(row.state)}"
    return shortened(text, _MAX_STATE_CELLS)


def _rate(row: HostRow) -> str:
    if row.batches_per_s is not None:
        return f"{rate(row.batches_per_s)} batches/s"
    return "" if row.steps_per_s is None else f"{rate(row.steps_per_s)} steps/s"


def _memory(row: HostRow) -> str:
    if row.memory_bytes is None or not row.memory_total_bytes:
        return ""
    return f"{size(row.memory_bytes)} of {size(row.memory_total_bytes)}"


def _network(row: HostRow) -> str:
    if row.received_bytes_s is None or row.sent_bytes_s is None:
        return ""
    return f"in {rate(row.received_bytes_s / 1e6)}, out {rate(row.sent_bytes_s / 1e6)} MB/s"


def _event(event: EventRow) -> Text:
    at = time.strftime("%H:%M:%S", time.gmtime(event.t))
    text = " ".join(event.text.split())
    return _line(f"{at} {event.host} {event.what.replace('_', ' ')}{': ' if text else ''}{text}")


def _line(text: str, style: str = "") -> Text:
    """Return a line that is cut off at the edge of the terminal."""
    return Text(plain(text), style, no_wrap=True, overflow="ellipsis")


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


_COLUMNS = (
    _Column("HOST", lambda row: row.host, 0, is_number=False),
    _Column("ROLE", lambda row: row.role, 5, is_number=False),
    _Column("STATE", _state, 0, is_number=False),
    _Column("STEP", lambda row: "" if row.step is None else f"{row.step:,}", 2),
    _Column("RATE", _rate, 1),
    _Column("WAIT", lambda row: _percent(row.wait_share), 1),
    _Column("BUSY", lambda row: "" if row.workers is None else f"{row.busy}/{row.workers}", 3),
    _Column("QUEUED", lambda row: "" if row.queued is None else str(row.queued), 4),
    _Column("CPU", lambda row: _percent(row.cpu), 6),
    _Column("MEMORY", _memory, 7),
    _Column("GPU", lambda row: _percent(row.gpu), 6),
    _Column("NETWORK", _network, 8),
    _Column("TYPE", lambda row: row.instance_type or "", 9, is_number=False),
)


def _table(rows: Sequence[HostRow], width: int) -> Table:
    """Return the table of hosts, with as many columns as fit."""
    columns = {column: [plain(column.text(row)) for row in rows] for column in _COLUMNS}
    kept: list[_Column] = []
    room = width
    for column in sorted(columns, key=lambda one: one.rank):
        texts = columns[column]
        cells = max(map(cell_len, [column.title, *texts])) + 2
        if column.rank == 0 or (any(texts) and cells <= room):
            kept.append(column)
            room -= cells
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in _COLUMNS:
        if column in kept:
            table.add_column(
                column.title, justify="right" if column.is_number else "left", no_wrap=True, overflow="ellipsis"
            )
    for number, row in enumerate(rows):
        cells_of = [columns[column][number] for column in _COLUMNS if column in kept]
        styles = [_sign(row)[1] if column.title == "STATE" else "" for column in _COLUMNS if column in kept]
        table.add_row(*(Text(text, style) for text, style in zip(cells_of, styles, strict=True)))
    return table
