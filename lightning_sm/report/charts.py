"""The pictures of a report: SVG whose colours are CSS variables, so that they suit a light and a dark page.

Parts are told apart by colour (the palette of Okabe and Ito) and by hatches, never by red and green alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_sm._text import duration, percent
from lightning_sm.record.events import PARTS, Steps
from lightning_sm.report.figures import OTHER, SHARES, SHUTDOWN, STEPS, WAITING, Figures, StepFigures

# Widths in inches: for a page, and for a phone or a column of several runs. Text keeps its size.
_WIDE = 8.0
_NARROW = 4.2
_COLUMNS = {_WIDE: 160, _NARROW: 80}
# Two colours that nothing else has, which become variables of the page.
_INK, _GRID, _PAPER = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--grid)", _PAPER: "var(--paper)"}
# Colour and hatch by part. Readers look for waiting, so it has the colour that stands out.
_STYLES = {
    "data_wait": ("#d55e00", "//"),
    "to_device": ("#e69f00", "||"),
    "forward": ("#0072b2", ""),
    "backward": ("#56b4e9", "\\\\"),
    "optimizer": ("#009e73", "xx"),
    "other": ("#999999", ""),
    WAITING: ("#d55e00", "//"),
    STEPS: ("#0072b2", ""),
    "start-up": ("#cc79a7", "\\\\"),
    "first batch": ("#e69f00", "||"),
    "validation": ("#56b4e9", "xx"),
    "ends of epochs": ("#44aa99", "-"),
    "checkpoints": ("#009e73", "--"),
    "export": ("#8c6d31", "++"),
    "test and prediction": ("#b0a030", "/"),
    SHUTDOWN: ("#bbbbbb", "\\\\"),
    OTHER: ("#999999", ""),
}
PART_NAMES = {
    "data_wait": "waiting for data",
    "to_device": "to the device",
    "forward": "forward",
    "backward": "backward, with gradient exchange",
    "optimizer": "optimizer",
    "other": "other",
}
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":")
# A few steps that took this many times as long as usual would flatten the rest of the picture.
_CUT = 5.0
# Metrics beyond this number are only in the table.
MAX_METRICS = 8
# Events beyond this number cannot be told apart in a picture.
_MAX_NUMBERED_EVENTS = 30
_USUAL_EVENTS = {"checkpoint_saved", "retry", "slow_request", "succeeded"}


@dataclass(frozen=True)
class Picture:
    """A picture in two widths.

    Attributes:
        label: What it shows, for those who do not see it.
        wide: SVG for a page.
        narrow: SVG for a phone.
    """

    label: str
    wide: str
    narrow: str


def time_shares(runs: Sequence[Figures]) -> Picture:
    """Draw where the time of each run went, as one bar per run."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        longest = max(run.seconds for run in runs)
        factor, unit = _time_unit(longest)
        shown = [name for name in SHARES if any(run.shares[name] > 0 for run in runs)]
        for row, run in enumerate(runs):
            left = 0.0
            for name in shown:
                width = run.shares[name] / factor
                _bar(axes, row, width, left, name, label=name if row == 0 else "")
                left += width
        names = [_plain(run.run.name, 28) for run in runs]
        axes.set_yticks(range(len(runs)) if len(runs) > 1 else [], names if len(runs) > 1 else [])
        axes.invert_yaxis()
        axes.set_xlim(0, longest / factor)
        axes.set_xlabel(unit)
        _legend(figure, axes)

    texts = []
    for run in runs:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in run.shares.items() if seconds > 0)
        texts.append(f"{run.run.name}: {parts}")
    return _picture(f"Where the time went. {'; '.join(texts)}.", draw, 1.5 + 0.35 * len(runs), "shares", runs)


def step_times(run: Figures) -> Picture | None:
    """Draw the parts of a step over the time of the run, with its events; None without steps."""
    lines = [line for _, own in run.series for line in own if line.n]
    if not lines:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        factor, unit = _time_unit(run.attempts[-1].end - run.begin)
        bins = binned(run, _COLUMNS[figure.get_figwidth()])
        usual = median(times.step_s for _, _, times in bins)
        top = min(max(times.step_s for _, _, times in bins), _CUT * usual)
        scale, step_unit = (1e-3, "ms") if top < 1 else (1.0, "s")
        edges = _edges(bins)
        bottom = [0.0] * len(edges)
        for part in PARTS:
            upper = [
                low + (times.parts[part] / times.n / scale if times else 0.0)
                for low, (_, times) in zip(bottom, edges, strict=True)
            ]
            if upper != bottom:
                colour, hatch = _STYLES[part]
                style: Any = {"facecolor": colour, "hatch": hatch, "edgecolor": _PAPER, "linewidth": 0}
                axes.fill_between([x / factor for x, _ in edges], bottom, upper, label=PART_NAMES[part], **style)
            bottom = upper
        _mark_events(axes, run, factor, top / scale)
        axes.set_ylim(0, 1.12 * top / scale)
        axes.set_xlim(left=0)
        axes.set_ylabel(f"{step_unit} per step")
        axes.set_xlabel(f"{unit} since the start")
        _legend(figure, axes)

    times = StepFigures.of(lines)
    parts = ", ".join(
        f"{PART_NAMES[part]} {percent(seconds / times.wall_s)}" for part, seconds in times.parts.items() if seconds > 0
    )
    return _picture(f"Time of a step over the run. On average: {parts}.", draw, 3.4, "steps", [run])


def step_parts(runs: Sequence[Figures]) -> Picture | None:
    """Draw the mean steps of several runs beside each other; None if none has steps."""
    timed = [run for run in runs if run.slowest.n]
    if not timed:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        scale, unit = (1e-3, "ms") if max(run.slowest.step_s for run in timed) < 1 else (1.0, "s")
        shown = [part for part in PARTS if any(run.slowest.parts[part] > 0 for run in timed)]
        for row, run in enumerate(timed):
            left = 0.0
            for part in shown:
                width = run.slowest.parts[part] / run.slowest.n / scale
                _bar(axes, row, width, left, part, label=PART_NAMES[part] if row == 0 else "")
                left += width
        axes.set_yticks(range(len(timed)), [_plain(run.run.name, 28) for run in timed])
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} per step")
        _legend(figure, axes)

    label = "; ".join(f"{run.run.name}: {duration(run.slowest.step_s)} a step" for run in timed)
    return _picture(f"Parts of a step. {label}.", draw, 1.5 + 0.35 * len(timed), "parts", timed)


def host_use(run: Figures) -> Picture | None:
    """Draw how busy the CPUs and GPUs of each host were; None if no host has a record of that."""
    hosts = [host for host in run.hosts if host.cpu is not None]
    if not hosts:
        return None
    kinds: list[tuple[str, tuple[str, str], Callable[[Any], float | None]]] = [
        ("CPU", ("#0072b2", ""), lambda host: host.cpu)
    ]
    if any(host.gpu is not None for host in hosts):
        kinds.append(("GPU (any kernel running)", ("#e69f00", "//"), lambda host: host.gpu))

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        height = 0.8 / len(kinds)
        for index, (label, (colour, hatch), value) in enumerate(kinds):
            rows = [row + index * height for row in range(len(hosts))]
            widths = [100 * (value(host) or 0.0) for host in hosts]
            axes.barh(rows, widths, height, color=colour, hatch=hatch, edgecolor=_PAPER, linewidth=0.5, label=label)
        middle = (len(kinds) - 1) * height / 2
        axes.set_yticks(
            [row + middle for row in range(len(hosts))], [_plain(f"{h.name} ({h.role})", 26) for h in hosts]
        )
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% busy, mean")
        if len(kinds) > 1:
            _legend(figure, axes)

    texts = [f"{host.name} {percent(host.cpu or 0)}" for host in hosts]
    height = 1.0 + 0.3 * len(hosts) * len(kinds) + (0.3 if len(kinds) > 1 else 0)
    return _picture(f"CPUs in use, mean by host: {', '.join(texts)}.", draw, height, "hosts", [run])


def metrics(runs: Sequence[Figures], names: Sequence[str]) -> Picture | None:
    """Draw the values that the model logged, over steps: a small picture for each metric; None without metrics.

    Args:
        runs: Runs whose curves share a picture.
        names: The metrics.
    """
    if not names:
        return None

    def draw(figure: Figure) -> None:
        columns = 2 if figure.get_figwidth() == _WIDE and len(names) > 1 else 1
        rows = math.ceil(len(names) / columns)
        figure.set_figheight(1.9 * rows + (0.4 if len(runs) > 1 else 0.0))
        for index, name in enumerate(names):
            axes = figure.add_subplot(rows, columns, index + 1)
            for number, run in enumerate(runs):
                points = thinned(run.metrics.get(name, []), 200)
                axes.plot(
                    [step for step, _ in points],
                    [value for _, value in points],
                    color=_LINES[number % len(_LINES)],
                    linestyle=_DASHES[number % len(_DASHES)],
                    marker="o" if len(points) < 15 else "",  # noqa: PLR2004 - single points make no line
                    markersize=3,
                    linewidth=1.4,
                    label=_plain(run.run.name, 40),
                )
            axes.set_title(_plain(name, 40), fontsize=10)
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if len(runs) > 1:
            _legend(figure, figure.axes[0])

    label = ", ".join(names)
    return _picture(f"What the model logged, by step: {label}.", draw, 2.0, f"metrics-{label}", runs)


def binned(run: Figures, columns: int) -> list[tuple[float, float, StepFigures]]:
    """Return begin and end, in seconds since the run began, and the steps of each part of the time that has any."""
    width = max(1e-9, (run.attempts[-1].end - run.begin) / columns)
    found = []
    for _, lines in run.series:
        groups: dict[int, list[Steps]] = {}
        for line in lines:
            if line.n:
                groups.setdefault(int((line.t - run.begin) / width), []).append(line)
        for group in groups.values():
            begin = group[0].t - group[0].wall_s - run.begin
            found.append((max(0.0, begin), group[-1].t - run.begin, StepFigures.of(group)))
    return found


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return a limited number of points: means of neighbours, and the last one as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most - 1))
    before = points[:-1]
    groups = [before[index : index + size] for index in range(0, len(before), size)]
    means = [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]
    return [*means, points[-1]]


def numbered_events(run: Figures) -> list[Any]:
    """Return the events that pictures mark by their numbers, from 1: those that do not happen in every job."""
    return [event for event in run.events if event.what not in _USUAL_EVENTS][:_MAX_NUMBERED_EVENTS]


def _edges(bins: Sequence[tuple[float, float, StepFigures]]) -> list[tuple[float, StepFigures | None]]:
    """Return both ends of each bar, and gaps where there were no steps: between attempts, and in validations."""
    edges: list[tuple[float, StepFigures | None]] = []
    for begin, end, times in bins:
        if edges and begin - edges[-1][0] > end - begin:
            edges += [(edges[-1][0], None), (begin, None)]
        edges += [(begin, times), (end, times)]
    return edges


def _mark_events(axes: Any, run: Figures, factor: float, top: float) -> None:
    last = -math.inf
    span = max(1e-9, (run.attempts[-1].end - run.begin) / factor)
    for number, event in enumerate(numbered_events(run), 1):
        at = event.seconds / factor
        axes.axvline(at, color=_INK, linewidth=0.8, linestyle=":")
        if at - last > 0.03 * span:  # else the numbers overlap; the list below has all
            axes.text(at, 1.04 * top, str(number), fontsize=8, ha="center", color=_INK)
            last = at


def _bar(axes: Any, row: int, width: float, left: float, style: str, *, label: str) -> None:
    colour, hatch = _STYLES[style]
    axes.barh(
        row, width, 0.7, left=left, color=colour, hatch=hatch, edgecolor=_PAPER, linewidth=0.5, label=label or None
    )


def _legend(figure: Figure, axes: Any) -> None:
    """Put the legend below the picture, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 3 if figure.get_figwidth() == _WIDE else 2
        figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, fontsize=8, frameon=False, handlelength=1.6
        )


def _picture(label: str, draw: Callable[[Figure], None], height: float, name: str, runs: Sequence[Figures]) -> Picture:
    salt = f"{name}-{'-'.join(run.run.name for run in runs)}"
    wide, narrow = (_svg(draw, width, height, f"{salt}-{width}") for width in (_WIDE, _NARROW))
    return Picture(label, wide, narrow)


def _svg(draw: Callable[[Figure], None], width: float, height: float, salt: str) -> str:
    settings: Any = {
        "svg.fonttype": "none",  # text stays text: it can be selected, searched, and read out
        "svg.hashsalt": salt,  # ids must be the same for the same input, and differ between the pictures of a page
        "text.color": _INK,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "xtick.color": _INK,
        "ytick.color": _INK,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "axes.labelsize": 9,
        "hatch.linewidth": 0.6,
        "font.family": ["sans-serif"],
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def _time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which to show a time of this length: its seconds, and its name."""
    for factor, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * factor:
            return factor, unit
    return 1.0, "seconds"


def _plain(text: str, most: int) -> str:
    """Return the user's text without Matplotlib's mathematics, and shortened to fit."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    return short.replace("$", r"\$")
