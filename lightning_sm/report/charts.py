"""The charts of a report, as SVG whose colours are CSS variables, for light and dark pages.

Parts differ by colour (the Okabe-Ito palette) and hatch, never by red and green alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_sm._text import duration, percent, shortened
from lightning_sm.record.events import PARTS, HostUse
from lightning_sm.report.figures import OTHER, RESTARTS, SHUTDOWN, STEPS, WAITING, Figures

_WIDTH = 8.0  # inches
# Readers cannot distinguish more points than this on a curve.
_MAX_POINTS = 160
# Placeholder colours that nothing else uses, to be replaced by CSS variables.
_INK, _GRID, _PAPER = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--grid)", _PAPER: "var(--paper)"}
# Colour and hatch of each part. Waiting has the most conspicuous colour, because readers look for it.
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
    "first step": ("#e69f00", "||"),
    "validation": ("#56b4e9", "xx"),
    "between epochs": ("#44aa99", "-"),
    "checkpoints": ("#009e73", "--"),
    "model export": ("#8c6d31", "++"),
    "test and prediction": ("#b0a030", "/"),
    RESTARTS: ("#f0e442", "xx"),
    SHUTDOWN: ("#bbbbbb", "\\\\"),
    OTHER: ("#999999", ""),
}
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":")
# Additional hosts and metrics appear only in the tables.
_MAX_HOSTS, _MAX_CURVES = 8, 8
_SETTINGS: Any = {
    "svg.fonttype": "none",  # keep text selectable, searchable, and readable by screen readers
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "axes.edgecolor": _GRID,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.facecolor": "none",
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    "axes.labelsize": 9,
    "hatch.linewidth": 0.6,
    "font.family": ["sans-serif"],
}


@dataclass(frozen=True)
class Picture:
    """A chart.

    Attributes:
        label: Text alternative for screen readers.
        svg: The chart as SVG.
    """

    label: str
    svg: str


@mpl.rc_context(_SETTINGS)
def time_shares(run: Figures) -> Picture:
    """Draw where the time of a run went, as a stacked bar."""
    figure = Figure(figsize=(_WIDTH, 1.85), layout="constrained")
    axes = figure.add_subplot()
    factor, unit = _unit(sum(run.shares.values()))
    left = 0.0
    shares = {part: seconds for part, seconds in run.shares.items() if seconds > 0}
    for part, seconds in shares.items():
        axes.barh(0, seconds / factor, 0.7, left=left, label=part, linewidth=0.5, **_style(part))
        left += seconds / factor
    axes.set_yticks([])
    axes.margins(x=0)
    axes.set_xlabel(unit)
    parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in shares.items())
    return _picture(f"Where the time went: {parts}.", figure, axes)


@mpl.rc_context(_SETTINGS)
def step_times(run: Figures, shown: Sequence[Figures]) -> Picture | None:
    """Draw the parts of a step over the course of the run, with events. Return None without steps.

    Args:
        run: The run.
        shown: All runs on the page. Their charts share one scale for step times.
    """
    if not run.pace.num_steps:
        return None
    slowest_s = max(times.step_s for one in shown for _, _, times in one.bins)
    scale, step_unit = _unit(slowest_s)
    factor, unit = _unit(run.attempts[-1].end - run.begin)
    figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
    axes = figure.add_subplot()
    widths = [(end - begin) / factor for begin, end, _ in run.bins]
    bottom = [0.0] * len(run.bins)
    for part in PARTS:
        heights = [times.parts[part] / times.num_steps / scale for _, _, times in run.bins]
        if any(heights):
            lefts = [begin / factor for begin, _, _ in run.bins]
            axes.bar(lefts, heights, widths, bottom, align="edge", label=PARTS[part], linewidth=0, **_style(part))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for event in run.unusual_events:
        axes.axvline(event.seconds / factor, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.05 * slowest_s / scale)
    axes.set_ylabel(f"{step_unit} per step")
    axes.set_xlabel(f"{unit} since the start")
    parts = ", ".join(
        f"{PARTS[part]} {percent(seconds / run.pace.wall_s)}" for part, seconds in run.pace.parts.items() if seconds > 0
    )
    return _picture(f"Time of a step over the run. On average: {parts}.", figure, axes)


@mpl.rc_context(_SETTINGS)
def host_use(run: Figures) -> Picture | None:
    """Draw the use of each host's CPUs, memory and GPUs over time. Return None if no host recorded it."""
    hosts = [host for host in run.hosts if host.uses]
    drawn = hosts[:_MAX_HOSTS]
    if not hosts:
        return None
    kinds: dict[str, Callable[[HostUse], float | None]] = {
        "CPUs": lambda use: use.cpu,
        "memory": lambda use: use.memory,
        "GPUs (any kernel running)": lambda use: use.gpu,
        "GPU memory": lambda use: use.gpu_memory,
    }
    factor, unit = _unit(run.attempts[-1].end - run.begin)
    figure = Figure(figsize=(_WIDTH, 0.8 + 1.15 * len(drawn)), layout="constrained")
    for row, host in enumerate(drawn):
        axes = figure.add_subplot(len(drawn), 1, row + 1)
        for number, (name, value) in enumerate(kinds.items()):
            shares = [((use.t - run.begin) / factor, value(use)) for use in host.uses]
            points = [(t, 100 * share) for t, share in shares if share is not None]
            _curve(axes, points, number, name if points else "")
        axes.set_title(_plain(f"{host.name} ({host.role})"), fontsize=10)
        axes.set_ylim(0, 105)
        axes.set_xlim(0, max(1e-9, (run.attempts[-1].end - run.begin) / factor))
        axes.set_ylabel("% in use")
    figure.axes[-1].set_xlabel(f"{unit} since the start")
    texts = ", ".join(f"{host.name} {percent(host.cpu or 0)}" for host in hosts)
    label = f"Use of hosts over the run. CPUs in use, mean by host: {texts}."
    most = max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    return _picture(label, figure, most)


@mpl.rc_context(_SETTINGS)
def metrics(run: Figures, names: Sequence[str]) -> Picture | None:
    """Draw the model's logged values by step, in a small chart for each metric. Return None without curves.

    Args:
        run: The run.
        names: The metrics, in order of importance. Only the first ones are drawn.
    """
    names = [name for name in names if len(run.metrics[name]) > 1][:_MAX_CURVES]
    if not names:
        return None
    rows = math.ceil(len(names) / 2)
    figure = Figure(figsize=(_WIDTH, 1.9 * rows + 0.4), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, min(2, len(names)), index + 1)
        _curve(axes, run.metrics[name], 0, "")
        axes.set_title(_plain(name), fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return _picture(f"What the model logged, by step: {', '.join(names)}.", figure, figure.axes[0])


def _curve(axes: Any, points: Sequence[tuple[float, float]], number: int, label: str) -> None:
    """Draw a curve in the style with the given number."""
    every = 1 + len(points) // _MAX_POINTS
    shown = points[::-every]  # from the end, to include the last value
    axes.plot(
        [x for x, _ in shown],
        [y for _, y in shown],
        color=_LINES[number % len(_LINES)],
        linestyle=_DASHES[number % len(_DASHES)],
        marker="o" if len(shown) < 15 else "",  # noqa: PLR2004 - a few points alone do not show as a line
        markersize=3,
        linewidth=1.4,
        label=label or None,
    )


def _style(part: str) -> dict[str, Any]:
    colour, hatch = _STYLES[part]
    return {"color": colour, "hatch": hatch, "edgecolor": _PAPER}


def _picture(label: str, figure: Figure, axes: Any) -> Picture:
    """Render a figure with the legend of ``axes`` below it, where the legend covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8, frameon=False, handlelength=1.6)
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return Picture(label, svg)


def _unit(seconds: float) -> tuple[float, str]:
    """Return the unit for showing times of up to ``seconds``: its length in seconds, and its name."""
    for factor, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * factor:
            return factor, unit
    return (1.0, "seconds") if seconds >= 1 else (1e-3, "ms")


def _plain(text: str) -> str:
    """Escape Matplotlib's math markup in the user's text, and shorten the text to fit."""
    return shortened(text, 40).replace("$", r"\$")
