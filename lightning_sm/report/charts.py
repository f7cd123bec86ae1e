"""The pictures of a report: SVG whose colours are CSS variables, so that they suit a light and a dark page.

Parts are told apart by colour (the palette of Okabe and Ito) and by hatches, never by red and green alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_sm._text import duration, percent
from lightning_sm.record.events import PARTS, HostUse
from lightning_sm.record.totals import Totals
from lightning_sm.report.figures import OTHER, RESTARTS, SHARES, SHUTDOWN, STEPS, WAITING, Figures

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
    "first batches": ("#e69f00", "||"),
    "validation": ("#56b4e9", "xx"),
    "ends of epochs": ("#44aa99", "-"),
    "checkpoints": ("#009e73", "--"),
    "model export": ("#8c6d31", "++"),
    "test and prediction": ("#b0a030", "/"),
    RESTARTS: ("#f0e442", "xx"),
    SHUTDOWN: ("#bbbbbb", "\\\\"),
    OTHER: ("#999999", ""),
}
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":")
# A few steps that took much longer would flatten the rest of the picture: it is cut at this many times what this share
# of the run stays below.
_CUT, _USUAL_SHARE = 1.5, 0.9
_T = TypeVar("_T")
# Hosts beyond this number are only in the table.
_MAX_HOSTS = 8


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
    factor, unit = _time_unit(max(run.seconds for run in runs))
    bars = [{name: run.shares[name] / factor for name in SHARES} for run in runs]
    texts = []
    for run in runs:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in run.shares.items() if seconds > 0)
        texts.append(f"{run.run.name}: {parts}")
    return _bars(f"Where the time went. {'; '.join(texts)}.", runs, bars, unit, "shares")


def step_times(run: Figures) -> Picture | None:
    """Draw the parts of a step over the time of the run, with its events; None without steps."""
    if not run.pace.num_steps:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        factor, unit = _time_unit(run.attempts[-1].end - run.begin)
        bins = run.binned_steps(_COLUMNS[figure.get_figwidth()])
        longest_s, begin_s, end_s = max((times.step_s, begin, end) for begin, end, times in bins)
        top = top_of_steps([times.step_s for _, _, times in bins])
        scale, step_unit = _step_unit(top)
        edges = _edges(bins)
        bottom = [0.0] * len(edges)
        for part in PARTS:
            upper = [
                low + (times.parts[part] / times.num_steps / scale if times else 0.0)
                for low, (_, times) in zip(bottom, edges, strict=True)
            ]
            if upper != bottom:
                colour, hatch = _STYLES[part]
                style: Any = {"facecolor": colour, "hatch": hatch, "edgecolor": _PAPER, "linewidth": 0}
                axes.fill_between([x / factor for x, _ in edges], bottom, upper, label=PARTS[part], **style)
            bottom = upper
        _mark_events(axes, run, factor, top / scale)
        if longest_s > top:
            is_late = begin_s > run.attempts[-1].end - run.begin - end_s
            at, side = (begin_s, "right") if is_late else (end_s, "left")
            axes.text(
                at / factor, 1.1 * top / scale, f" {duration(longest_s)} ", fontsize=8, ha=side, va="top", color=_INK
            )
        axes.set_ylim(0, 1.12 * top / scale)
        axes.set_xlim(left=0)
        axes.set_ylabel(f"{step_unit} per step")
        axes.set_xlabel(f"{unit} since the start")
        _legend(figure, axes)

    parts = ", ".join(
        f"{PARTS[part]} {percent(seconds / run.pace.wall_s)}" for part, seconds in run.pace.parts.items() if seconds > 0
    )
    return _picture(f"Time of a step over the run. On average: {parts}.", draw, 3.4, "steps", [run])


def top_of_steps(seconds: Sequence[float]) -> float:
    """Return where a picture of steps is cut: above all of them, unless a few would flatten the others.

    Args:
        seconds: Of a step, in each part of the time.
    """
    usual = sorted(seconds)[int(_USUAL_SHARE * len(seconds))]
    return min(max(seconds), _CUT * usual)


def step_parts(runs: Sequence[Figures]) -> Picture | None:
    """Draw the mean steps of several runs beside each other; None if none has steps."""
    timed = [run for run in runs if run.pace.num_steps]
    if not timed:
        return None

    scale, unit = _step_unit(max(run.pace.step_s for run in timed))
    bars = [{part: run.pace.parts[part] / run.pace.num_steps / scale for part in PARTS} for run in timed]
    label = "; ".join(f"{run.run.name}: {duration(run.pace.step_s)} a step" for run in timed)
    return _bars(f"Parts of a step. {label}.", timed, bars, f"{unit} per step", "parts")


def host_use(run: Figures) -> Picture | None:
    """Draw how much of CPUs, memory and GPUs each host used over time; None if no host has a record of that."""
    hosts = [host for host in run.hosts if host.uses]
    drawn = hosts[:_MAX_HOSTS]
    if not hosts:
        return None
    kinds: dict[str, Callable[[HostUse], float | None]] = {
        "CPUs": lambda use: use.cpu,
        "memory": lambda use: use.memory,
        "GPUs (any kernel running)": lambda use: use.gpu,
        "memory of GPUs": lambda use: use.gpu_memory,
    }

    def draw(figure: Figure) -> None:
        factor, unit = _time_unit(run.attempts[-1].end - run.begin)
        for row, host in enumerate(drawn):
            axes = figure.add_subplot(len(drawn), 1, row + 1)
            for number, (name, value) in enumerate(kinds.items()):
                shares = [((use.t - run.begin) / factor, value(use)) for use in host.uses]
                points = [(t, 100 * share) for t, share in shares if share is not None]
                _curve(axes, points, _COLUMNS[figure.get_figwidth()], number, name if points else "")
            axes.set_title(_plain(f"{host.name} ({host.role})", 40), fontsize=10)
            axes.set_ylim(0, 105)
            axes.set_xlim(0, max(1e-9, (run.attempts[-1].end - run.begin) / factor))
            axes.set_ylabel("% in use")
            if row < len(drawn) - 1:
                axes.set_xticklabels([])
        figure.axes[-1].set_xlabel(f"{unit} since the start")
        _legend(figure, max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[1])))

    texts = ", ".join(f"{host.name} {percent(host.cpu or 0)}" for host in hosts)
    label = f"Use of hosts over the run. CPUs in use, mean by host: {texts}."
    return _picture(label, draw, 0.8 + 1.15 * len(drawn), "hosts", [run])


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
                _curve(axes, run.metrics.get(name, []), 200, number, _plain(run.run.name, 40))
            axes.set_title(_plain(name, 40), fontsize=10)
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if len(runs) > 1:
            _legend(figure, figure.axes[0])

    label = ", ".join(names)
    return _picture(f"What the model logged, by step: {label}.", draw, 2.0, f"metrics-{label}", runs)


def thinned(points: Sequence[tuple[_T, float]], most: int) -> list[tuple[_T, float]]:
    """Return a limited number of points: means of neighbours, and the last one as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most - 1))
    before = points[:-1]
    groups = [before[index : index + size] for index in range(0, len(before), size)]
    means = [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]
    return [*means, points[-1]]


def _edges(bins: Sequence[tuple[float, float, Totals]]) -> list[tuple[float, Totals | None]]:
    """Return both ends of each bar, and gaps where there were no steps: between attempts, and in validations."""
    edges: list[tuple[float, Totals | None]] = []
    for begin, end, times in bins:
        if edges and begin - edges[-1][0] > end - begin:
            edges += [(edges[-1][0], None), (begin, None)]
        edges += [(begin, times), (end, times)]
    return edges


def _mark_events(axes: Any, run: Figures, factor: float, top: float) -> None:
    last = -math.inf
    span = max(1e-9, (run.attempts[-1].end - run.begin) / factor)
    for number, event in enumerate(run.unusual_events, 1):
        at = event.seconds / factor
        axes.axvline(at, color=_INK, linewidth=0.8, linestyle=":")
        if at - last > 0.03 * span:  # else the numbers overlap; the list below has all
            axes.text(at, 1.04 * top, str(number), fontsize=8, ha="center", color=_INK)
            last = at


def _curve(axes: Any, points: Sequence[tuple[float, float]], most: int, number: int, label: str) -> None:
    """Draw a curve through at most so many points, in the style of its number."""
    shown = thinned(points, most)
    axes.plot(
        [x for x, _ in shown],
        [y for _, y in shown],
        color=_LINES[number % len(_LINES)],
        linestyle=_DASHES[number % len(_DASHES)],
        marker="o" if len(shown) < 15 else "",  # noqa: PLR2004 - single points make no line
        markersize=3,
        linewidth=1.4,
        label=label or None,
    )


def _bars(label: str, runs: Sequence[Figures], bars: Sequence[Mapping[str, float]], unit: str, name: str) -> Picture:
    """Draw a bar for each run, one below the other, whose parts follow one another."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        rows = range(len(runs))
        left = [0.0] * len(runs)
        for part in bars[0]:
            widths = [bar[part] for bar in bars]
            if not any(widths):
                continue
            colour, hatch = _STYLES[part]
            style: Any = {"color": colour, "hatch": hatch, "edgecolor": _PAPER, "linewidth": 0.5}
            axes.barh(rows, widths, 0.7, left=left, label=PARTS.get(part, part), **style)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        names = {row: _plain(run.run.name, 28) for row, run in enumerate(runs) if len(runs) > 1}
        axes.set_yticks(list(names), list(names.values()))
        axes.invert_yaxis()
        axes.margins(x=0)
        axes.set_xlabel(unit)
        _legend(figure, axes)

    return _picture(label, draw, 1.5 + 0.35 * len(runs), name, runs)


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


def _step_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which to show steps of up to this length: its seconds, and its name."""
    return (1e-3, "ms") if seconds < 1 else (1.0, "s")


def _plain(text: str, most: int) -> str:
    """Return the user's text without Matplotlib's mathematics, and shortened to fit."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    return short.replace("$", r"\$")
