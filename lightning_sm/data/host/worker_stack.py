"""The stack of a worker that hangs, which its parent can read although the worker runs no Python code.

A library that has started threads hangs in forked workers: the fork has none of them. The main thread then waits in
native code, where no signal handler of Python's runs, but faulthandler's does. It costs nothing until it is asked.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import sysconfig

from lightning_sm.job.control_folder import STACKS_SIGNAL

_CAPACITY = 1 << 18
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class WorkerStack:
    """Memory in which a worker writes its stacks. Make it before the worker starts.

    Args:
        fd: The memory, received from the parent; None: new memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("lightning_sm_stack", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _CAPACITY)
        self._memory = mmap.mmap(self.fd, _CAPACITY)
        self._num_read = 0

    def write_on_signal(self) -> None:
        """Write the stacks of all threads of this process whenever ``ask`` names it. Call it in the worker."""
        faulthandler.register(STACKS_SIGNAL, file=self.fd)

    @staticmethod
    def ask(pid: int) -> None:
        """Let a worker write its stacks, which takes it milliseconds."""
        os.kill(pid, STACKS_SIGNAL)

    def take(self) -> str:
        """Return what the worker has written since the last call; empty: nothing yet.

        For each thread it has a line, and its frames, the innermost first. The thread that got the signal, which is the
        main one, is called the current thread.
        """
        end = self._memory.find(b"\0", self._num_read)
        start, self._num_read = self._num_read, _CAPACITY if end < 0 else end
        return self._memory[start : self._num_read].decode(errors="replace")

    def close_descriptor(self) -> None:
        """Close the descriptor. The parent needs only the memory, and may have hundreds of workers."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Release descriptor and memory."""
        self.close_descriptor()
        self._memory.close()


def without_our_start(stacks: str) -> str:
    """Leave out the frames by which a worker's main thread was started.

    Args:
        stacks: What ``take`` returned.
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
        stacks: What ``take`` returned.
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
