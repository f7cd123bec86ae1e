"""The text of a worker's stacks, as faulthandler writes them."""

from __future__ import annotations

import os
import re
import sysconfig

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def without_our_start(stacks: str) -> str:
    """Leave out the frames by which a worker's main thread was started.

    Args:
        stacks: What ``WorkerNotes.take_stacks`` returned.
    """
    kept = []
    is_ours = False
    for line in stacks.splitlines():
        frame = _FRAME.fullmatch(line)
        is_ours = frame is not None and (is_ours or (frame[1].startswith(_PACKAGE) and frame[3] == "run_worker"))
        if not is_ours:
            kept.append(f"{line}\n")
    return "".join(kept)


def innermost_call(stacks: str) -> str:
    """Return where the main thread is, such as "frame.py:40 in collect, called by data.py:12 in __getitem__".

    Args:
        stacks: What ``WorkerNotes.take_stacks`` returned.
    """
    _, _, current = stacks.partition("Current thread")
    frames: list[tuple[str, str]] = []
    for line in current.splitlines()[1:]:
        frame = _FRAME.fullmatch(line)
        if frame is None:
            break
        file, number, function = frame.groups()
        frames.append((file, f"{file}:{number} in {function}"))
    if not frames:
        return ""
    by_user = next((index for index, (file, _) in enumerate(frames) if not file.startswith((*_LIBRARIES, _PACKAGE))), 0)
    return frames[0][1] + (f", called by {frames[by_user][1]}" if by_user else "")
