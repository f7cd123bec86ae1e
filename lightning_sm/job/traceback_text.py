"""A parser for exceptions as Python prints them, on stderr and in messages passed between processes. Pure logic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# torch.distributed prefixes every line of an uncaught exception with its rank. A progress bar without a newline may
# precede the prefix.
RANK = re.compile(r"^\[rank(\d+)\]: ?")
START = re.compile(r"(\[rank(?P<rank>\d+)\]: )?(?:Original )?Traceback \(most recent call last\):\s*$")
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
# The format of Python's warnings.formatwarning, which adds the line of source code, indented by two spaces. Lightning
# omits that line and the category when the warning is about its own code.
WARNING = re.compile(r"^\S.*:\d+: \w*Warning: |^\S*/(?:lightning|lightning_fabric|pytorch_lightning)/\S+\.py:\d+: ")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
# Python prints no header for a script that it cannot compile.
_SYNTAX_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError): ")
# Lines that libraries log after the traceback, while the interpreter exits.
_LATE_LOG = re.compile(r"^(?:\[rank\d+\]:)?\[[WE]\d{4} ")
# Python prints these above the traceback of an exception that did not end the process.
_SURVIVED = ("Exception in thread ", "Exception ignored ")


@dataclass(frozen=True)
class PrintedException:
    """An exception as Python printed it.

    Attributes:
        lines: Type and message.
        frames: The frames, innermost last: ``File "train.py", line 3, in main: code``.
        rank: The rank that printed the exception; None if the lines are not marked with a rank.
    """

    lines: tuple[str, ...]
    frames: tuple[str, ...]
    rank: int | None = None


def frame(file: str, line: int | str, name: str | None, code: str | None) -> str:
    """Format a stack frame as one line."""
    return f'File "{file}", line {line}' + (f", in {name}" if name else "") + (f": {code}" if code else "")


def lines_of(text: str) -> list[str]:
    """Split text at line feeds and carriage returns, and remove escape sequences and trailing spaces."""
    return [line.rstrip() for line in ANSI.sub("", text).replace("\r", "\n").split("\n")]


def rank_of(line: str) -> int | None:
    """Return the rank in a line's prefix, or None if there is none."""
    mark = RANK.match(line)
    return None if mark is None else int(mark.group(1))


def last_exception(lines: Sequence[str]) -> PrintedException | None:
    """Return a text's last exception, or None if there is none; everything after its frames counts as its message."""
    start = _last_start(lines)
    if start is None:
        return None
    header = START.search(lines[start])
    mark = "" if header is None or header["rank"] is None else f"[rank{header['rank']}]: "
    # Ranks print at the same time, so keep only the lines of this rank.
    body = [line[len(mark) :] for line in lines[start + (header is not None) :] if line.startswith(mark.rstrip())]
    frames: list[str] = []
    for index, line in enumerate(body):
        match = _FRAME.match(line)
        if match is not None:
            code = next((code.strip() for code in body[index + 1 : index + 2] if code.startswith("    ")), None)
            frames.append(frame(match["file"], match["line"], match["name"], code))
        elif not line.startswith(" "):
            is_exception = frames and EXCEPTION.match(line) and (header is not None or _SYNTAX_ERROR.match(line))
            rank = int(header["rank"]) if header is not None and mark else None
            return PrintedException(tuple(body[index:]), tuple(frames), rank) if is_exception else None
    return None


def exception_that_ended(lines: Sequence[str]) -> PrintedException | None:
    """Return the exception that ended a process, or None if its stderr does not end with one.

    An exception that a script has caught and logged looks the same, but is followed by other output. Only indented
    lines, warnings, lines that libraries log at exit, and lines marked with the same rank may follow. The end of a
    multi-line message that has neither indentation nor a rank cannot be determined.

    Args:
        lines: The last lines of stderr.
    """
    printed, start = last_exception(lines), _last_start(lines)
    if printed is None or start is None:
        return None
    before = next((line for line in reversed(lines[:start]) if line), "")
    message = tuple(takewhile(lambda line: not _is_late(line), printed.lines))
    rest = [line for line in printed.lines[1:] if not _is_late(line)]
    strangers = [line for line in lines[start + 1 :] if printed.rank is not None and not RANK.match(line)]
    is_end = all(map(_is_late, strangers)) and (printed.rank is not None or all(line[0] in " \t" for line in rest))
    if not is_end or RANK.sub("", before).startswith(_SURVIVED):
        return None
    return replace(printed, lines=message)


def _last_start(lines: Sequence[str]) -> int | None:
    starts = [index for index, line in enumerate(lines) if START.search(line) or _is_headless(lines, index)]
    return starts[-1] if starts else None


def _is_late(line: str) -> bool:
    return not line or bool(WARNING.match(line) or _LATE_LOG.match(line))


def _is_headless(lines: Sequence[str], index: int) -> bool:
    before = lines[index - 1] if index else ""
    return _FRAME.match(lines[index]) is not None and not before.startswith(" ") and START.search(before) is None
