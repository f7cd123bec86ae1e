"""What Python, argparse and torch print when a process fails: tracebacks and usage errors, causes and consequences.

Rules without I/O, for the reason of a failure and for what the log shows of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# A message of several lines (our own tables, CUDA's hints) may be followed by the output of other processes.
_MAX_EXCEPTION_LINES = 12

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# torch.distributed prefixes every line of an uncaught exception with its rank. A progress bar without a newline may
# precede it.
RANK = re.compile(r"^\[rank\d+\]: ?")
START = re.compile(r"(\[rank(?P<rank>\d+)\]: )?(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# Raised because another process exited: the reason of a failure only if there is no other exception.
_CONSEQUENCE = re.compile(
    r"SIGTERM|KeyboardInterrupt|SystemExit|ProcessRaisedException|ProcessExitedException"
    r"|^\S+: Caught \w+ in DataLoader worker"
)
_LOST_CONNECTION = re.compile(
    r"BrokenPipe|Broken pipe|ConnectionReset|Connection reset|ConnectionRefused|Connection closed by (?:remote )?peer"
)
# Messages of NCCL, and of PyTorch for NCCL and TCPStore. They may stand on any line of an exception, after its cause.
_LOST_PEER = re.compile(
    r"remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
    r"|DistStoreError: (?:Socket Timeout|wait timeout)"
)
# Not on the first line where NCCL has lost a peer; and what Lightning raises in the handler of SIGTERM.
_STOPPED = re.compile(r"DistBackendError: NCCL|SIGTERMException")
# argparse and jsonargparse: "train.py: error: ..." or "error: ...".
USAGE_ERROR = re.compile(r"^(?:[^\s:]+(?: [\w-]+)*: )?error: .+")
USAGE = re.compile(r"^usage: ")
# As Python's warnings.formatwarning has it; the line of source code follows, with two spaces. Lightning leaves out that
# line and the category where the warning is about its own code.
WARNING = re.compile(r"^\S.*:\d+: \w*Warning: |^\S*/(?:lightning|lightning_fabric|pytorch_lightning)/\S+\.py:\d+: ")


@dataclass
class Traceback:
    """One exception as Python printed it.

    Attributes:
        frames: The frames, the raising one last: ``File "train.py", line 3, in main: code``.
        exception: The lines of the exception: type and message.
        is_chained: Whether it was raised while the previous exception was handled.
        is_ignored: Whether it was raised where Python ignores exceptions, such as in ``__del__``.
        rank: The rank that printed it, if it said so.
    """

    frames: list[str] = field(default_factory=list)
    exception: list[str] = field(default_factory=list)
    is_chained: bool = False
    is_ignored: bool = False
    rank: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it was raised because another process had ended, or where it ends nothing."""
        if self.is_ignored or any(pattern.search(self.exception[0]) for pattern in (_CONSEQUENCE, _LOST_CONNECTION)):
            return True
        return any(_LOST_PEER.search(line) for line in self.exception)


def may_follow_from_another(exception: str) -> bool:
    """Whether the first line of an exception is what ranks raise when another process, or the job, has ended.

    Args:
        exception: The line. NCCL says only in later ones whether that is its cause.
    """
    return any(pattern.search(exception) for pattern in (_LOST_CONNECTION, _LOST_PEER, _STOPPED))


def cause_of(tracebacks: Sequence[Traceback]) -> Traceback | None:
    """The first exception that is not a consequence; in a chain of exceptions, the last such one."""
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
    """Yield the exceptions that a process and its children printed, in their order.

    Args:
        lines: Lines without colours and trailing spaces.
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
            traceback = _parsed(lines[index:])  # a syntax error in the script: Python prints no headline
            if not traceback.exception or "Error: " not in traceback.exception[0]:
                continue
        else:
            continue
        if traceback.exception:
            yield traceback


def _parsed(lines: Sequence[str]) -> Traceback:
    """Read frames up to the exception, and skip lines that other processes wrote in between."""
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
    """The first line and the lines that continue it."""
    message = [lines[0]]
    for line in lines[1:_MAX_EXCEPTION_LINES]:
        if not line or START.search(line):
            break
        message.append(line)
    return message
