"""What SageMaker shows as the reason of a failed job, taken from the end of the script's stderr.

The service keeps the first 1024 characters of ``/opt/ml/output/failure``, so that the exception itself comes first
and what led to it after it. (sagemaker-training begins with the command line, which often fills the space alone.)
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

# SageMaker developer guide, "How Amazon SageMaker Signals Algorithm Success and Failure".
_MAX_CHARS = 1024
# The exception may take this much, so that the frame that raised it always fits behind it.
_MAX_EXCEPTION_CHARS = 700
# A message of several lines (our own tables, CUDA's hints) is followed by whatever other processes write.
_MAX_EXCEPTION_LINES = 12
# argparse's, and so jsonargparse's.
_USAGE_EXIT_CODE = 2
# Exit codes of processes that a signal killed are above.
_SIGNALS = 128

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# torch.distributed prefixes every line of an uncaught exception with its rank; a progress bar that was not ended
# by a newline may precede it.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_START = re.compile(r"(\[rank\d+\]: )?(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# What one process raises because another one ended: never the reason, as long as there is any other.
_CONSEQUENCE = re.compile(
    r"SIGTERM|KeyboardInterrupt|SystemExit|BrokenPipe|Broken pipe|ConnectionReset|Connection reset|ConnectionRefused"
    r"|Connection closed by (?:remote )?peer|ProcessRaisedException|ProcessExitedException"
    r"|^\S+: Caught \w+ in DataLoader worker"
)
# NCCL's, and PyTorch's for NCCL and TCPStore, on any line of the message: what led to it comes first.
_LOST_PEER = re.compile(
    r"remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
    r"|DistStoreError: (?:Socket Timeout|wait timeout)"
)
# argparse and jsonargparse: "train.py: error: ..." or "error: ...".
_USAGE_ERROR = re.compile(r"^(?:[^\s:]+(?: [\w-]+)*: )?error: .+")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen ")


@dataclass
class _Traceback:
    """One exception as Python printed it.

    Attributes:
        frames: The calls, the raising one last: ``File "train.py", line 3, in main: code``.
        exception: The lines of the exception: type and message.
        is_chained: Whether it was raised while the exception before it was handled.
        is_ignored: Whether it was raised where Python ignores exceptions, such as ``__del__``.
    """

    frames: list[str] = field(default_factory=list)
    exception: list[str] = field(default_factory=list)
    is_chained: bool = False
    is_ignored: bool = False

    @property
    def is_consequence(self) -> bool:
        if self.is_ignored or _CONSEQUENCE.search(self.exception[0]) is not None:
            return True
        return any(_LOST_PEER.search(line) for line in self.exception)


def failure_reason(stderr_tail: str, exit_code: int) -> str:
    """Say in at most 1024 characters why a training script failed, the decisive words first.

    Args:
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
        exit_code: Exit code of the script, 128 + n if signal n killed it.
    """
    lines = _lines(stderr_tail)
    ending = _ending(exit_code)
    usage_error = next((index for index, line in enumerate(lines) if _USAGE_ERROR.match(line)), None)
    if exit_code == _USAGE_EXIT_CODE and usage_error is not None:
        return _limited("\n".join([*_message(lines[usage_error:]), ending]))
    tracebacks = list(_tracebacks(lines))
    traceback = _reason(tracebacks)
    if traceback is None and exit_code < _SIGNALS:
        # Nothing but consequences: the script ended with the last one. (One that was killed did not.)
        traceback = next((last for last in reversed(tracebacks) if not last.is_ignored), None)
    if traceback is not None:
        exception = _limited("\n".join(traceback.exception), _MAX_EXCEPTION_CHARS)
        return _with_frames(exception, traceback.frames, ending)
    said = [line for line in lines if line]
    if not said:
        return f"The training script ended without a word on stderr: {ending}."
    return _with_end_of(said, ending)


def is_consequence(stderr_tail: str) -> bool:
    """Tell whether a script failed only because a process on another host had ended.

    Args:
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
    """
    tracebacks = list(_tracebacks(_lines(stderr_tail)))
    return bool(tracebacks) and all(traceback.is_consequence for traceback in tracebacks)


def _lines(stderr_tail: str) -> list[str]:
    text = _ANSI.sub("", stderr_tail).replace("\r\n", "\n").replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n")]


def _ending(exit_code: int) -> str:
    try:
        return f"killed by {signal.Signals(exit_code - _SIGNALS).name} (exit code {exit_code})"
    except ValueError:
        return f"exit code {exit_code}"


def _reason(tracebacks: list[_Traceback]) -> _Traceback | None:
    """The first exception that no other process caused; of exceptions raised from each other, the last."""
    chains: list[list[_Traceback]] = []
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


def _tracebacks(lines: list[str]) -> Iterator[_Traceback]:
    for index, line in enumerate(lines):
        start = _START.search(line)
        if start is not None:
            prefix = start.group(1) or ""
            rest = [rest.removeprefix(prefix) for rest in lines[index + 1 :] if rest.startswith(prefix.rstrip())]
            traceback = _parsed(rest)
            before = [line for line in lines[:index] if line and line.startswith(prefix.rstrip())][-1:]
            traceback.is_chained = bool(before) and any(text in before[0] for text in _CHAINED)
            traceback.is_ignored = bool(before) and before[0].startswith("Exception ignored")
        elif _FRAME.match(line) and (index == 0 or not lines[index - 1].startswith((" ", "Traceback", "["))):
            traceback = _parsed(lines[index:])  # a script that does not compile: Python prints no headline
            if not traceback.exception or "Error: " not in traceback.exception[0]:
                continue
        else:
            continue
        if traceback.exception:
            yield traceback


def _parsed(lines: list[str]) -> _Traceback:
    """Read frames up to the exception. Lines of other processes that came in between are passed over."""
    traceback = _Traceback()
    for index, raw in enumerate(lines):
        line = _RANK.sub("", raw)
        frame = _FRAME.match(line)
        if frame is not None:
            place = f'File "{frame["file"]}", line {frame["line"]}'
            traceback.frames.append(place + (f", in {frame['name']}" if frame["name"] else ""))
        elif line.startswith("    ") and traceback.frames and not set(line) <= set(" ^~"):
            if lines[index - 1].lstrip().startswith("File "):
                traceback.frames[-1] += f": {line.strip()}"
        elif _START.search(line):
            break
        elif traceback.frames and _EXCEPTION.match(line):
            traceback.exception = _message([_RANK.sub("", line) for line in lines[index:]])
            break
    return traceback


def _message(lines: list[str]) -> list[str]:
    """The first line and those that belong to it."""
    message = lines[:1]
    for line in lines[1:_MAX_EXCEPTION_LINES]:
        if not line or _START.search(line):
            break
        message.append(line)
    return message


def _with_frames(exception: str, frames: list[str], ending: str) -> str:
    """Add the frames nearest to the raise: the raising one, then those in code that is the user's own."""
    nearest = frames[::-1]
    wanted = nearest[:1] + [frame for frame in nearest[1:] if not _LIBRARY.search(frame)]
    reason = exception
    for frame in wanted:
        if len(reason) + len(frame) + len(ending) + 2 > _MAX_CHARS:
            break
        reason += f"\n{frame}"
    return _limited(f"{reason}\n{ending}")


def _with_end_of(said: list[str], ending: str) -> str:
    reason = f"{ending}; the last lines of stderr were:"
    room = _MAX_CHARS - len(reason)
    kept: list[str] = []
    for line in reversed(said):
        room -= len(line) + 1
        if room < 0 and kept:
            break
        kept.insert(0, line)
    return _limited("\n".join([reason, *kept]))


def _limited(text: str, limit: int = _MAX_CHARS) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
