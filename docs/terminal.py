"""Pictures of a terminal: SVG whose text is text, in the colours that the reader's system prefers, light or dark.

A moving picture plays with CSS animations, which browsers and GitHub play without a script. Whoever prefers no motion
sees its end.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

# Of progress lines, what one looks at first.
_LEFT_OUT = re.compile(r" (train_loss_step|train_loss|train_acc|steps_per_s|samples_per_s|memory_gb|eta)=\S+")
_COLUMNS, _ROWS = 118, 24
_PHONE_COLUMNS = 66
_WIDE_TABLE = re.compile(r"^attempt +host |^-+ {2}-|^ +\d+ {2}algo-")
_CHAR_PX, _LINE_PX, _MARGIN_PX = 7.8, 19, 16
# Nobody watches a job wait: longer pauses last this long, and the end stays for this long.
_LONGEST_PAUSE_S, _SPEED, _END_S = 1.2, 4.0, 7.0
_OTHER = "other"
# The first that fits decides. Colours repeat what words say.
_KINDS = {
    "command": r"^\$ ",
    "bad": r"^Fault |^\S.*? {2,}problem |^\d+ problem",
    "warned": r"^\S.*? {2,}warning ",
    "saved": r"Interrupted: |Resuming from|\+ (training|serving)",
    "progress": "epoch=|^epoch ",
}
# Text on its background has a contrast of at least 4.5 in both (WCAG AA).
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
        at_s: When it appears, in seconds.
        text: The line.
    """

    at_s: float
    text: str


def shortened(text: str) -> str:
    """Return a line without what a reader of half a minute does not need: more metrics, the folders of the run."""
    return re.sub(r"/\S+/(?=[^/\s]+\.ckpt)", "…/", re.sub(r"lightning-sm: local-\S+: ", "", _LEFT_OUT.sub("", text)))


def paced(lines: Sequence[TimedLine]) -> list[TimedLine]:
    """Return the lines at the pace of the picture: faster than the job, and without its long pauses."""
    at_s, before_s, result = 0.0, 0.0, []
    for line in lines:
        at_s += min(_LONGEST_PAUSE_S, (line.at_s - before_s) / _SPEED)
        before_s = line.at_s
        result.append(TimedLine(round(at_s, 2), shortened(line.text)))
    return result


def still(title: str, lines: Sequence[str]) -> str:
    """Return lines as an SVG, as high as they are. A line that begins with blanks continues the one above.

    Args:
        title: What the picture shows.
        lines: The lines.
    """
    texts, kind = [], _OTHER
    for number, line in enumerate(lines):
        kind = kind if line.startswith("  ") else _kind(line)
        texts.append(_text(number, line.rstrip(), kind))
    return _document(title, _COLUMNS, len(lines), [], texts)


def moving(title: str, lines: Sequence[TimedLine], *, on_phone: bool = False) -> str:
    """Return lines as an SVG, which shows them one by one, scrolls, and begins again.

    Args:
        title: What the picture shows.
        lines: The lines, in the order of time.
        on_phone: Whether it is half as wide, without tables that need more. What else does not fit into a line
            continues below it.
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
    hidden: dict[float, int] = {}  # lines that have left the screen, by the percentage of the time
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
        # The first of each two holds the screen until then.
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
