"""The output of Python, argparse and torch when a process fails: tracebacks and usage errors, causes and consequences.

Rules without I/O, for the reason for a failure and for what the log shows of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# The output of other processes may follow a message of several lines (our own tables, CUDA's hints): read no further.
_MAX_EXCEPTION_LINES = 12

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# torch.distributed prefixes every line of an uncaught exception with its rank. A progress bar without a newline may
# precede it.
RANK = re.compile(r"^\[rank\d+\]: ?")
START = re.compile(r"(\[rank(?P<rank>\d+)\]: )?(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# Raised because another process exited: the reason for a failure only if there is no other exception.
_CONSEQUENCE = re.compile(
    r"SIGTERM|KeyboardInterrupt|SystemExit|ProcessRaisedException|ProcessExitedException"
    r"|^\S+: Caught \w+ in DataLoader worker"
)
_LOST_CONNECTION = re.compile(
    r"BrokenPipe|Broken pipe|ConnectionReset|Connection reset|ConnectionRefused|Connection closed by (?:remote )?peer"
)
# Messages of NCCL, and of PyTorch for NCCL and TCPStore. They may follow the cause, on any line of an exception.
_LOST_PEER = re.compile(
    r"remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
    r"|DistStoreError: (?:Socket Timeout|wait timeout)"
)
# First lines of what PyTorch raises when NCCL fails, whose loss of a peer is named only on a later line, and of what
# Lightning raises in its SIGTERM handler.
_STOPPED = re.compile(r"DistBackendError: NCCL|SIGTERMException")
# argparse and jsonargparse: "train.py: error: ..." or "error: ...".
USAGE_ERROR = re.compile(r"^(?:[^\s:]+(?: [\w-]+)*: )?error: .+")
USAGE = re.compile(r"^usage: ")
# The format of Python's warnings.formatwarning, which adds the line of source code, indented by two spaces. Lightning
# omits that line and the category when the warning is about its own code.
WARNING = re.compile(r"^\S.*:\d+: \w*Warning: |^\S*/(?:lightning|lightning_fabric|pytorch_lightning)/\S+\.py:\d+: ")


@dataclass
class Traceback:
    """One exception as Python printed it.

    Attributes:
        frames: The frames, the raising one last: ``File "train.py", line 3, in main: code``.
        exception: The lines of the exception: type and message.
        is_chained: Whether it was raised while the previous exception was handled.
        is_ignored: Whether it was raised where Python ignores exceptions, such as in ``__del__``.
        rank: The rank that printed it; None if the lines have no rank.
    """

    frames: list[str] = field(default_factory=list)
    exception: list[str] = field(default_factory=list)
    is_chained: bool = False
    is_ignored: bool = False
    rank: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it was raised because another process had exited, or where Python ignores it."""
        if self.is_ignored or any(pattern.search(self.exception[0]) for pattern in (_CONSEQUENCE, _LOST_CONNECTION)):
            return True
        return any(_LOST_PEER.search(line) for line in self.exception)


def may_follow_from_another(exception: str) -> bool:
    """Return whether an exception is typical of a rank whose peer, or whose job, has ended.

    Args:
        exception: Its first line. With NCCL, only later lines name the cause.
    """
    return any(pattern.search(exception) for pattern in (_LOST_CONNECTION, _LOST_PEER, _STOPPED))


def cause_of(tracebacks: Sequence[Traceback]) -> Traceback | None:
    """Return the first exception that is not a consequence; in a chain of exceptions, the last such one."""
    chains: list[list[Traceback]] = []
    for traceback in tracebacks:
        if traceback.is_chained and chains:
            chains[-1].append(traceback)
        else:
            chains.append([traceback])
    for chain in chains:
        causes = [traceback for traceback in chain if not traceback.is_consequence]
        if causes:
            return causes[-1]
    return None


def tracebacks_in(lines: Sequence[str]) -> Iterator[Traceback]:
    """Yield the exceptions that a process and its children printed, in order.

    Args:
        lines: Lines without colours or trailing spaces.
    """
    for index, line in enumerate(lines):
        start = START.search(line)
        if start is not None:
            prefix = start.group(1) or ""
            rest = [rest.removeprefix(prefix) for rest in lines[index + 1 :] if rest.startswith(prefix.rstrip())]
            traceback = _parsed(rest)
            traceback.rank = None if start["rank"] is None else int(start["rank"])
            before = [line for line in lines[:index] if line and line.startswith(prefix.rstrip())][-1:]
            traceback.is_chained = bool(before) and any(text in before[0] for text in CHAINED)
            traceback.is_ignored = bool(before) and before[0].startswith("Exception ignored")
        elif _FRAME.match(line) and (index == 0 or not lines[index - 1].startswith((" ", "Traceback", "["))):
            traceback = _parsed(lines[index:])  # a syntax error in the script, for which Python prints no header
            if not traceback.exception or "Error: " not in traceback.exception[0]:
                continue
        else:
            continue
        if traceback.exception:
            yield traceback


def _parsed(lines: Sequence[str]) -> Traceback:
    """Read the frames and the exception after them, skipping lines that other processes wrote in between."""
    traceback = Traceback()
    for index, raw in enumerate(lines):
        line = RANK.sub("", raw)
        frame = _FRAME.match(line)
        if frame is not None:
            place = f'File "{frame["file"]}", line {frame["line"]}'
            traceback.frames.append(place + (f", in {frame['name']}" if frame["name"] else ""))
        elif line.startswith("    ") and traceback.frames and not set(line) <= set(" ^~"):
            if lines[index - 1].lstrip().startswith("File "):
                traceback.frames[-1] += f": {line.strip()}"
        elif START.search(line):
            break
        elif traceback.frames and EXCEPTION.match(line):
            traceback.exception = _message([RANK.sub("", line) for line in lines[index:]])
            break
    return traceback


def _message(lines: Sequence[str]) -> list[str]:
    """Return the first line and the lines that continue it."""
    message = [lines[0]]
    for line in lines[1:_MAX_EXCEPTION_LINES]:
        if not line or START.search(line):
            break
        message.append(line)
    return message
