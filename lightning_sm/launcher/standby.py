"""A process that has imported a script's packages and waits, so that a restart need not import them.

Importing torch and Lightning takes most of the time from a failure to the next step. Once the script trains, a process
with the same environment imports what the script has imported. A restart tells it to run the script.

``python -m lightning_sm.launcher.standby SCRIPT...`` is such a process. It reads two lines from stdin: what to import,
and later that it is needed. If there is no second line, it exits.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.imports import Imports

# How often to look whether the script trains. Nothing announces that.
_POLL_S = 0.5
_EXIT_S = 5.0


class Standby:
    """The standby process of one host, made while a script runs and used by the next run of the same command.

    Where the launcher starts several ranks, it is the process that starts them, and each rank waits.

    Args:
        control: The folder in which the script says what it has imported.
    """

    def __init__(self, control: ControlFolder) -> None:
        self._control = control
        self._process: subprocess.Popen[bytes] | None = None
        self._made_for: tuple[Sequence[str], Path, Mapping[str, str]] | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the waiting process, if there is one, and of its process group."""
        process = self._process
        return None if process is None else process.pid

    def prepare(self, command: Sequence[str], directory: Path, env: Mapping[str, str]) -> None:
        """Start a process for the next run of a script that has just been started, once it trains.

        Args:
            command: The process that waits, ``waiting_command``.
            directory: Working directory of the script.
            env: Its environment.
        """
        self._is_over.clear()
        self._thread = threading.Thread(target=self._make, args=(command, directory, env), daemon=True)
        self._thread.start()

    def take(self, command: Sequence[str], directory: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Let the waiting process run its script; return it, or None if it does not wait for this command."""
        self._stop_thread()
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None  # noqa: S101 - a pipe, see _make
        if self._made_for == (command, directory, env) and process.poll() is None:
            with suppress(BrokenPipeError):  # it has just exited
                process.stdin.write(b"\n")
                process.stdin.close()
                return process
        _end(process)
        return None

    def close(self) -> None:
        """End the waiting process."""
        self._stop_thread()
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _stop_thread(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _make(self, command: Sequence[str], directory: Path, env: Mapping[str, str]) -> None:
        while (imports := self._control.imports()) is None:
            if self._is_over.wait(_POLL_S):
                return
        process = subprocess.Popen(
            list(command),
            cwd=directory,
            env=dict(env),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None  # noqa: S101 - a pipe
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(imports)).encode() + b"\n")
            process.stdin.flush()
        self._made_for = command, directory, env
        self._process = process


def waiting_command(command: Sequence[str]) -> list[str]:
    """Return the command of a process that waits to run another one, whose command line people still recognise.

    Args:
        command: Python, an option, and the arguments of the script.
    """
    return [*command[:2], "-m", __spec__.name, *command[2:]]


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait(_EXIT_S)


def main(argv: Sequence[str], lines: IO[str]) -> None:
    """Import, wait, and become the script's process."""
    sys.path[0] = os.getcwd() if argv[0] == "-m" else os.path.dirname(os.path.realpath(argv[0]))
    _import(Imports(**json.loads(lines.readline())))
    if not lines.readline():
        sys.exit(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    try:
        _run(argv)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does, without the frames of this file
        frames = error.__traceback__
        while frames is not None and any(frames.tb_frame.f_globals is own for own in (globals(), vars(runpy))):
            frames = frames.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def _import(imports: Imports) -> None:
    before = dict(os.environ)
    os.environ.update(imports.environment)
    for name in imports.modules:
        # A module may need what its importer has done before. The script will import it, and say what is wrong.
        with suppress(Exception):
            importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)


def _run(argv: Sequence[str]) -> None:
    """Run a script, or ``-m MODULE``, as the interpreter does."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    path = argv[0]
    sys.argv = list(argv)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __spec__=None)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin)
