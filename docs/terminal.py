"""Pictures of a terminal: SVGs with real text, in light or dark colours as the reader's system prefers.

Animated pictures use CSS animations, which browsers and GitHub play without a script. Readers who prefer reduced motion
see the last frame.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

# Matches the less important values of progress lines, which are omitted.
_LEFT_OUT = re.compile(r" (train_loss_step|train_loss|train_acc|steps_per_s|samples_per_s|memory_gb|eta)=\S+")
_COLUMNS, _ROWS = 118, 24
_PHONE_COLUMNS = 66
_WIDE_TABLE = re.compile(r"^attempt +host |^-+ {2}-|^ +\d+ {2}algo-")
_CHAR_PX, _LINE_PX, _MARGIN_PX = 7.8, 19, 16
# Longer pauses are cut to the first value, because nobody watches a job wait. The last frame stays for the last value.
_LONGEST_PAUSE_S, _SPEED, _END_S = 1.2, 4.0, 7.0
_OTHER = "other"
# The first matching pattern decides the colour, which only repeats what the words say.
_KINDS = {
    "command": r"^\$ ",
    "bad": r"^Fault |^\S.*? {2,}problem |^\d+ problem",
    "warned": r"^\S.*? {2,}warning ",
    "saved": r"Interrupted: |Resuming from|\+ (training|serving)",
    "progress": "epoch=|^epoch ",
}
# In both palettes, text has a contrast of at least 4.5 (WCAG AA).
_LIGHT = {
    "background": "#f6f8fa",
    _OTHER: "#1f2328",
    "command": "#000000",
    "bad": "#a40e26",
    "warned": "#7d4e00",
    "saved": "#116329",
    "progress": "#0550ae",
}
_DARK = {
    "background": "#0d1117",
    _OTHER: "#d0d7de",
    "command": "#ffffff",
    "bad": "#ffa198",
    "warned": "#ffa657",
    "saved": "#7ee787",
    "progress": "#a5d6ff",
}


@dataclass(frozen=True)
class TimedLine:
    """A line of the terminal.

    Attributes:
        at_s: Seconds from the beginning until the line appears.
        text: Text of the line.
    """

    at_s: float
    text: str


def shortened(text: str) -> str:
    """Return a line without minor metrics and the folders of the run, which a reader with half a minute can skip."""
    return re.sub(r"/\S+/(?=[^/\s]+\.ckpt)", "…/", re.sub(r"lightning-sm: local-\S+: ", "", _LEFT_OUT.sub("", text)))


def paced(lines: Sequence[TimedLine]) -> list[TimedLine]:
    """Return the lines at the pace of the picture: faster than the job, with long pauses cut short."""
    at_s, before_s, result = 0.0, 0.0, []
    for line in lines:
        at_s += min(_LONGEST_PAUSE_S, (line.at_s - before_s) / _SPEED)
        before_s = line.at_s
        result.append(TimedLine(round(at_s, 2), shortened(line.text)))
    return result


def still(title: str, lines: Sequence[str]) -> str:
    """Return lines as an SVG of their height.

    Args:
        title: What the picture shows.
        lines: The lines; an indented line has the colour of the line above.
    """
    texts, kind = [], _OTHER
    for number, line in enumerate(lines):
        kind = kind if line.startswith("  ") else _kind(line)
        texts.append(_text(number, line.rstrip(), kind))
    return _document(title, _COLUMNS, len(lines), [], texts)


def moving(title: str, lines: Sequence[TimedLine], *, on_phone: bool = False) -> str:
    """Return lines as an SVG that shows them one by one, scrolls, and starts over.

    Args:
        title: What the picture shows.
        lines: The lines, in order of time.
        on_phone: Whether to halve the width and omit tables that need more; other long lines are wrapped.
    """
    columns = _PHONE_COLUMNS if on_phone else _COLUMNS
    lines = [
        TimedLine(line.at_s, part)
        for line in lines
        if not (on_phone and _WIDE_TABLE.search(line.text))
        for part in textwrap.wrap(line.text, columns, subsequent_indent="    ", break_on_hyphens=False) or [""]
    ]
    total_s = lines[-1].at_s + _END_S
    styles, texts, kind = [], [], _OTHER
    hidden: dict[float, int] = {}  # number of lines that have scrolled off the screen, by percentage of the time
    for number, line in enumerate(lines):
        percent = 100 * line.at_s / total_s
        styles.append(
            f"@keyframes l{number} {{ 0%, {percent:.2f}% {{ opacity: 0 }} "
            f"{percent + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
            f" .l{number} {{ animation: l{number} {total_s:.2f}s linear infinite }}"
        )
        kind = kind if line.text.startswith("    ") else _kind(line.text)
        texts.append(_text(number, line.text, kind))
        hidden[percent] = max(0, number + 1 - _ROWS)
    scroll, before = ["0% { transform: translateY(0px) }"], 0
    for percent, rows in hidden.items():
        # The first keyframe of each pair holds the screen still until the second scrolls it.
        scroll += [f"{percent:.2f}% {{ {_up(before)} }}", f"{percent + 0.01:.2f}% {{ {_up(rows)} }}"]
        before = rows
    scroll.append(f"100% {{ {_up(before)} }}")
    styles += [
        f"@keyframes scroll {{ {' '.join(scroll)} }}",
        f".screen {{ animation: scroll {total_s:.2f}s linear infinite }}",
        f"@media (prefers-reduced-motion) {{ text {{ animation: none !important }} .screen {{ animation: none; "
        f"{_up(before)} }} }}",
    ]
    return _document(title, columns, _ROWS, styles, texts)


def _document(title: str, columns: int, rows: int, styles: Sequence[str], texts: Sequence[str]) -> str:
    width = columns * _CHAR_PX + 2 * _MARGIN_PX
    height = rows * _LINE_PX + 2 * _MARGIN_PX
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{html.escape(title)}</title>",
            "<style>",
            "text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }",
            ".command { font-weight: bold }",
            _colours(_LIGHT),
            f"@media (prefers-color-scheme: dark) {{ {_colours(_DARK)} }}",
            *styles,
            "</style>",
            f'<rect class="background" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            f'<svg y="{_MARGIN_PX // 2}" width="{width:.0f}" height="{height - _MARGIN_PX:.0f}"><g class="screen">',
            *texts,
            "</g></svg>",
            "</svg>",
            "",
        ]
    )


def _colours(colours: dict[str, str]) -> str:
    return " ".join(f".{kind} {{ fill: {colour} }}" for kind, colour in colours.items())


def _kind(text: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, text)), _OTHER)


def _text(number: int, text: str, kind: str) -> str:
    top = _MARGIN_PX + (number + 0.8) * _LINE_PX
    shown = text if len(text) <= _COLUMNS else text[: _COLUMNS - 1] + "…"
    return f'<text class="l{number} {kind}" x="{_MARGIN_PX}" y="{top:.0f}">{html.escape(shown)}</text>'


def _up(rows: int) -> str:
    return f"transform: translateY({-rows * _LINE_PX}px)"
