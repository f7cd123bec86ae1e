"""The main process of a ``DataHost``, run as ``python -m lightning_sm.data.host`` with a connection to its owner."""

from __future__ import annotations

import importlib
import signal
import socket
import sys
import traceback

from lightning_sm._collector import freeze_imports, pause_collector
from lightning_sm._log import show_log_lines
from lightning_sm.data.ipc.host_messages import Finished, Listening, Serve
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import run_and_exit


def main() -> None:
    """Serve until the owner closes the connection."""
    # The owner decides what Ctrl-C means, and closes the connection to stop this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_log_lines()
    owner = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    serve = owner.receive()
    if not isinstance(serve, Serve):
        return
    # Training waits for these imports, so pause the garbage collector.
    with pause_collector():
        for name in serve.imports:  # before our modules, which use whichever Lightning is imported
            importlib.import_module(name)
        from lightning_sm.data.host.main_process import MainProcess  # noqa: PLC0415 - while the collector is paused

        freeze_imports()
    try:
        MainProcess(serve.settings, lambda address: owner.send(Listening(address))).serve(until=owner)
    except Exception as error:
        owner.send(Finished("".join(traceback.format_exception(error)), is_error=True))
        raise


if __name__ == "__main__":
    run_and_exit(main)
