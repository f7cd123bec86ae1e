"""The page of a report: one HTML file without scripts, which needs nothing else and opens offline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_sm._text import duration, percent, rate, size, step_time
from lightning_sm._version import __version__
from lightning_sm.errors import JobConfigError
from lightning_sm.record.bottleneck import NOT_INPUT_BOUND
from lightning_sm.record.events import PARTS
from lightning_sm.record.prices import Prices
from lightning_sm.report import verdict
from lightning_sm.report.figures import Figures, Happening, HostSummary

_TABLE_ROWS = 40
# Metrics beyond this number are only in the table.
_MAX_CURVES = 8
# Numbers in boxes below the verdict.
_BOXES = 4
# Longer lists of events are folded.
_OPEN_ROWS = 12
_TEMPLATE = Path(__file__).with_name("page.html")
_NEEDED = ("matplotlib", "jinja2")


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        caption: What it shows.
        headers: Names of the columns.
        rows: The cells.
        is_open: Whether it is shown unfolded.
    """

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_open: bool = False


@dataclass(frozen=True)
class Section:
    """One part of the page about a run.

    Attributes:
        title: Its heading.
        pictures: What it shows.
        texts: Sentences.
        tables: Tables, folded, except for short ones that are open.
        note: How to read the pictures.
    """

    title: str
    pictures: tuple[Any, ...] = ()
    texts: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    note: str = ""


def check_libraries() -> None:
    """Check that the libraries for pages are installed.

    Raises:
        JobConfigError: One is not; the message says what to install.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise JobConfigError(f"A report needs {' and '.join(missing)}: pip install 'lightning-sm[report]'.")


def render(runs: Sequence[Figures], prices: Prices) -> str:
    """Return the page about one run, or about several side by side.

    Args:
        runs: At least one.
        prices: Prices of hosts; empty if the user gave none.

    Raises:
        JobConfigError: A library is not installed.
    """
    check_libraries()
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - may be missing

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=", ".join(run.run.name for run in runs),
        columns=[_summary(run, prices) for run in runs],
        shared=_shared(runs) if len(runs) > 1 else (),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(max(run.attempts[-1].end for run in runs))),
        sections=[_sections(run, prices, is_alone=len(runs) == 1) for run in runs],
    )


def _summary(run: Figures, prices: Prices) -> dict[str, Any]:
    return {
        "name": run.run.name,
        "ending": verdict.ending(run),
        "headline": " ".join(filter(None, (verdict.headline(run), verdict.scope(run)))),
        "numbers": list(islice(_numbers(run, prices), _BOXES)),
    }


def _numbers(run: Figures, prices: Prices) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run, each with its name, the most telling ones first."""
    yield "duration", duration(run.seconds)
    amount = verdict.price(run, prices)
    if amount is not None:
        yield "cost", prices.amount(amount)
    if run.pace.waiting >= NOT_INPUT_BOUND:
        yield "steps wait for data", percent(run.pace.waiting)
    # What the model is judged by: a metric of the validation rather than a loss, or than one of the training.
    for name in sorted(_metric_names(run), key=lambda name: (not name.startswith("val"), "loss" in name))[:1]:
        values = [value for _, value in run.metrics[name]]
        is_lower_better = any(word in name for word in ("loss", "err", "perplexity"))
        best, last = f"{(min if is_lower_better else max)(values):.4g}", f"{values[-1]:.4g}"
        yield f"best {name}", best if best == last else f"{best} (last {last})"
    if run.pace.num_steps:
        what, number = ("samples", run.samples_per_step) if run.samples_per_step else ("steps", 1.0)
        yield f"{what} per second", rate(number / run.pace.step_s)
        yield "time of a step", step_time(run.pace.step_s)
    yield "outcome", run.outcome
    yield "steps", f"{run.num_steps:,}"
    yield "hosts", f"{len(run.hosts):,}"


def _shared(runs: Sequence[Figures]) -> tuple[Section, ...]:
    from lightning_sm.report import charts  # noqa: PLC0415 - Matplotlib takes a second to load, or may be missing

    names = [name for name in _curves(runs[0]) if all(name in run.metrics for run in runs[1:])]
    sections = [
        Section("Where the time went", _existing(charts.time_shares(runs)), tables=(_shares_table(runs),)),
        Section("Time of a step", _existing(charts.step_parts(runs)), tables=(_parts_table(runs),)),
        Section("Loss and metrics", _existing(charts.metrics(runs, names))),
    ]
    return tuple(section for section in sections if section.pictures)


def _sections(run: Figures, prices: Prices, *, is_alone: bool) -> list[Section]:
    from lightning_sm.report import charts  # noqa: PLC0415 - see above

    names = _metric_names(run)
    changes = verdict.changes(run, prices) or ["Nothing that this record shows is worth a change."]
    notes = list(_pace_notes(run))
    if run.unusual_events:
        notes.append("Dotted lines are the numbered events below.")
    # Of several runs, one picture shows it side by side.
    times = Section("Where the time went", _existing(charts.time_shares([run])), tables=(_shares_table([run]),))
    return [
        Section(
            "Time of a step",
            _existing(charts.step_times(run)),
            texts=() if run.pace.num_steps else ("No training step is recorded.",),
            tables=(_parts_table([run]), _steps_table(run)) if run.pace.num_steps else (),
            note=" ".join(notes),
        ),
        Section("What to change", texts=tuple(changes)),
        *([times] if is_alone else []),
        *([Section("Ranks", tables=(_ranks_table(run),))] if len(run.ranks) > 1 else []),
        Section("Hosts", _existing(charts.host_use(run)), tables=_host_tables(run), texts=tuple(_host_notes(run))),
        Section(
            "Loss and metrics",
            _existing(charts.metrics([run], _curves(run))),
            texts=() if names else ("The model logged nothing.",),
            tables=(_metrics_table(run, names),) if names else (),
        ),
        Section("Events", texts=() if run.events else ("None.",), tables=_event_tables(run)),
        *([Section("Hyperparameters", tables=(_hyperparameters_table(run),))] if run.hyperparameters else []),
        Section("How it was measured", texts=tuple(_method(run, prices)), tables=(_packages_table(run),)),
    ]


def _existing(*pictures: Any) -> tuple[Any, ...]:
    return tuple(picture for picture in pictures if picture is not None)


def _metric_names(run: Figures) -> list[str]:
    """Return the names of the metrics: losses first, those of the data service last."""
    return sorted(run.metrics, key=lambda name: (name.startswith("data/"), "loss" not in name, name))


def _curves(run: Figures) -> list[str]:
    """Return the names of the metrics that have a curve, as many as a page takes."""
    return [name for name in _metric_names(run) if len(run.metrics[name]) > 1][:_MAX_CURVES]


def _shares_table(runs: Sequence[Figures]) -> Table:
    shown = [name for name in runs[0].shares if any(run.shares[name] > 0 for run in runs)]
    rows = [
        (
            name,
            *(f"{duration(run.shares[name])} ({percent(run.shares[name] / max(1e-9, run.seconds))})" for run in runs),
        )
        for name in shown
    ]
    rows.append(("all attempts", *(duration(run.seconds) for run in runs)))
    names = ("", *(run.run.name for run in runs))
    return Table("Seconds of the rank that sets the pace, and of its host", names, tuple(rows))


def _parts_table(runs: Sequence[Figures]) -> Table:
    def cell(run: Figures, part: str) -> str:
        steps = run.pace
        if not steps.num_steps:
            return ""
        return f"{step_time(steps.parts[part] / steps.num_steps)} ({percent(steps.parts[part] / steps.wall_s)})"

    rows = [(PARTS[part], *(cell(run, part) for run in runs)) for part in PARTS]
    rows.append(("a step", *(step_time(run.pace.step_s) if run.pace.num_steps else "" for run in runs)))
    rows.append(("longest step", *(step_time(run.pace.longest_s) if run.pace.num_steps else "" for run in runs)))
    samples = [(run.samples_per_step or 0.0) / run.pace.step_s if run.pace.num_steps else 0.0 for run in runs]
    if any(samples):
        rows.append(("samples per second, all ranks", *(rate(number) if number else "" for number in samples)))
    rows.append(("steps of the run", *(f"{run.num_steps:,}" for run in runs)))
    return Table(
        "Mean step of the rank that sets the pace, without the first step of each start",
        ("", *(run.run.name for run in runs)),
        tuple(rows),
    )


def _steps_table(run: Figures) -> Table:
    rows = [
        (
            f"{duration(begin)}",
            f"{times.num_steps:,}",
            step_time(times.step_s),
            *(f"{1e3 * times.parts[part] / times.num_steps:.3g}" for part in PARTS),
        )
        for begin, _, times in run.binned_steps(_TABLE_ROWS)
    ]
    headers = ("since the start", "steps", "a step", *(f"{PARTS[part]} (ms)" for part in PARTS))
    return Table("Steps over time, without the first one of each start", headers, tuple(rows))


def _pace_notes(run: Figures) -> Iterator[str]:
    """Yield whose steps the page shows, if there are several ranks."""
    if run.pace_rank is None or run.world_size <= 1:
        return
    name = run.name_of(run.pace_rank)
    yield f"The steps are those of {name}, for which the others wait in their backward pass."
    waited_s = run.ranks[run.pace_rank].parts["data_wait"]
    if run.pace.parts["data_wait"] > waited_s:
        yield (
            f"The picture has {percent(waited_s / run.pace.wall_s)} of waiting for data. Others wait, too: training "
            f"waits {percent(run.pace.waiting)} of the time, the rest of which {name} has in its backward pass."
        )


def _ranks_table(run: Figures) -> Table:
    """Return how fast each rank is by itself, the slowest one first."""
    rows = [
        (
            pace.name,
            f"{pace.num_steps:,}",
            *map(step_time, (pace.step_s, pace.wait_s, pace.own_s, pace.step_s - pace.wait_s - pace.own_s)),
        )
        for pace in sorted(run.rank_paces, key=lambda pace: -pace.own_s - pace.wait_s)
    ]
    headers = ("rank", "steps", "a step", "waiting for data", "its own work", "with other ranks: backward, optimizer")
    return Table("The ranks, the slowest one first", headers, tuple(rows), is_open=len(rows) <= _OPEN_ROWS)


def _host_tables(run: Figures) -> tuple[Table, ...]:
    def optional(value: Any, text: Any) -> str:
        return "" if value is None else str(text(value))

    def row(host: HostSummary) -> tuple[str, ...]:
        memory = host.memory
        return (
            host.name,
            _role(host),
            host.group,
            host.instance_type or "",
            str(host.cpus or ""),
            str(host.gpus or ""),
            optional(host.cpu, percent),
            optional(host.gpu, percent),
            "" if memory is None else f"{size(memory[0])} of {size(memory[1])}",
            optional(host.received_bytes_s, lambda rate: f"{size(rate)}/s"),
            optional(host.sent_bytes_s, lambda rate: f"{size(rate)}/s"),
        )

    headers = ("host", "role", "group", "type", "CPUs", "GPUs", "CPU", "GPU", "peak memory", "received", "sent")
    caption, of_data = "What each host did", "What the data hosts did, as rank 0 saw it"
    if len(run.attempts) > 1:
        caption += f" in all attempts; groups and types are those of attempt {run.attempts[-1].number}"
        of_data += ", in all attempts"
    tables = [Table(caption, headers, tuple(row(host) for host in run.hosts))]
    _, data_hosts = run.data
    if data_hosts:
        rows = []
        for host in data_hosts:
            busy = host.busy_s / host.capacity_s if host.capacity_s else 0.0
            build = step_time(host.built_s / host.num_built) if host.num_built else ""
            numbers = (f"{host.num_built:,}", build, f"{host.num_retries:,}", f"{host.num_lost:,}")
            rows.append((host.name, host.state, f"{host.workers:,}", percent(busy), *numbers))
        names = (
            "data host",
            "state",
            "workers",
            "busy under load",
            "batches",
            "time for one",
            "retries",
            "connections lost",
        )
        tables.append(Table(of_data, names, tuple(rows)))
    return tuple(tables)


def _role(host: HostSummary) -> str:
    """Return the role of a host in the last attempt, and in those in which its name had another one."""
    if not host.earlier_roles:
        return host.role
    earlier = ", ".join(f"{role} in attempt {number}" for number, role in host.earlier_roles.items())
    return f"{host.role} ({earlier})"


def _host_notes(run: Figures) -> Any:
    silent = [host.name for host in run.hosts if not host.uses]
    if silent:
        yield (
            f"Without a record here: {', '.join(silent)}. On SageMaker each host has its own: lightning-sm report "
            "shows all of them once the job's checkpoints or output.tar.gz are downloaded."
        )


def _metrics_table(run: Figures, names: Sequence[str]) -> Table:
    rows = []
    for name in names:
        points = run.metrics[name]
        values = [value for _, value in points]
        numbers = (f"{values[0]:.6g}", f"{values[-1]:.6g}", f"{min(values):.6g}", f"{max(values):.6g}")
        rows.append((name, f"{len(points):,}", *numbers, f"{points[-1][0]:,}"))
    return Table("Metrics", ("metric", "points", "first", "last", "min", "max", "last step"), tuple(rows))


def _event_tables(run: Figures) -> tuple[Table, ...]:
    numbered = run.unusual_events
    numbers = {id(event): str(number) for number, event in enumerate(numbered, 1)}
    headers = ("", "since the start", "host", "what", "")

    def what(event: Happening) -> str:
        return event.what.replace("_", " ")

    def rows(events: Sequence[Happening]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (numbers.get(id(event), ""), duration(max(0.0, event.seconds)), event.host, what(event), event.text)
            for event in events
        )

    tables = []
    if numbered:
        caption = "Events that are marked in the picture"
        tables.append(Table(caption, headers, rows(numbered), is_open=len(numbered) <= _OPEN_ROWS))
    if len(run.events) > len(numbered):
        tables.append(Table("All events", headers, rows(run.events)))
    return tuple(tables)


def _method(run: Figures, prices: Prices) -> Any:
    heads = [record.head for record in run.run.records]
    hosts = {head.host for head in heads}
    yield (
        f"Records: {len(heads)}; hosts with one: {len(hosts)} of {len(run.hosts)}; source: {run.run.source}; begun "
        f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(run.begin))}."
    )
    yield (
        "A step is one training batch. Its times are those of the training process: on a GPU, forward, backward and "
        "optimizer are measured on the GPU every few steps where the record says so; else only their start is timed. "
        "Steps do not include validations, checkpoints, the first batch after each start, or the ends of epochs. The "
        "exchange of gradients overlaps with the backward pass and cannot be told apart from it."
    )
    if prices:
        yield f"Cost: time of the attempts x prices ({prices.source}). Storage, transfer and logs cost extra."
    commands = {" ".join(head.command) for head in heads if head.command}
    for command in sorted(commands):
        yield f"Command: {command}"


def _hyperparameters_table(run: Figures) -> Table:
    rows = tuple(run.hyperparameters.items())
    return Table("Hyperparameters of the job", ("name", "value"), rows, is_open=len(rows) <= _OPEN_ROWS)


def _packages_table(run: Figures) -> Table:
    packages: dict[str, str] = {}
    for record in run.run.records:
        packages |= dict(record.head.packages)
    return Table("Packages", ("package", "version"), tuple(sorted(packages.items())))
