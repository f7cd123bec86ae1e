"""The server process of a data host, which moves bytes between workers and trainers and runs no user code."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import grpc
from msgspec import structs

from lightning_sm._linux import kill_with_parent
from lightning_sm._structs import Struct
from lightning_sm.data.ipc import host_messages
from lightning_sm.data.ipc.messages import Message, MessageSocket, NothingReceivedError
from lightning_sm.data.ipc.processes import connection_to_parent, run_and_exit
from lightning_sm.data.protocol import calls
from lightning_sm.data.protocol.message_codec import decode
from lightning_sm.data.protocol.openings import OpeningsRequest
from lightning_sm.data.protocol.spec import snapshot_hash
from lightning_sm.data.server.leases import Leases
from lightning_sm.data.server.listener import Listener
from lightning_sm.data.server.openings import Openings
from lightning_sm.data.server.stream import fetch
from lightning_sm.data.server.worker_pool import WorkerPool
from lightning_sm.data.settings import HostSettings
from lightning_sm.errors import DataHostMismatchError, DataSettingsError, WireError
from lightning_sm.record.data_figures import RankFigures

logger = logging.getLogger(__name__)

_Request = TypeVar("_Request", bound=Struct)

# A call that waits for the user's setup() returns after this time even if nothing is open yet, so that the trainer can
# log the wait.
_CALL_TIMEOUT_S = 5.0

# The main process keeps this many unwanted sources, in case a rank wants them again.
_NUM_SPARE = 3

# Maximum time for notifying trainers that this host is exiting.
_STOP_TIMEOUT_S = 1.0


class ServerProcess:
    """The gRPC server and its state.

    Args:
        main: Connection to the data host's main process.
        settings: Address, limits and credentials.
        snapshots: Digests of the sources that the main process has, the newest last.
    """

    def __init__(self, main: MessageSocket, settings: HostSettings, snapshots: list[str]) -> None:
        self._main = main
        self._settings = settings
        self._pool = WorkerPool(lambda worker: self._send(host_messages.KillWorker(worker)))
        lease_s, now = settings.lease_s, time.monotonic()
        self._leases = Leases(lease_s, settings.startup_timeout_s, now, may_restart=settings.may_restart)
        self._leasing = threading.Lock()
        self._loading = threading.Lock()
        self._snapshots = snapshots
        self._openings = Openings(self._send, lambda digest: digest in self._snapshots, self._pool.keep)
        self._figures: dict[str, RankFigures] = {}  # by trainer rank
        self._handlers = {
            "OpenSources": grpc.unary_unary_rpc_method_handler(self._open_sources),
            "Load": grpc.stream_unary_rpc_method_handler(self._load),
            "Fetch": grpc.stream_stream_rpc_method_handler(partial(fetch, self._pool)),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(self._heartbeat),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
        }

    def run(self) -> None:
        """Serve until the main process closes the connection."""
        try:
            listener = Listener(self._handlers, self._settings)
        except DataSettingsError as error:
            self._send(host_messages.Finished(str(error), is_error=True))
            return
        self._send(host_messages.Listening(listener.address))
        while True:
            try:
                message = self._main.receive(timeout_s=0.5)
            except NothingReceivedError:
                with self._leasing:
                    outcome = self._leases.outcome(time.monotonic())
                    # With the lock, or a rank that connects in the meantime would lose its openings.
                    self._openings.keep(self._leases.running(time.monotonic()))
                if outcome is not None:
                    self._send(outcome)
                continue
            if message is None:
                break
            self._handle(message)
        listener.stop(_STOP_TIMEOUT_S)
        self._pool.close()

    def _handle(self, message: Message) -> None:
        match message:
            case host_messages.NewWorker(fds=()):
                logger.debug("A worker's connection was lost: the worker exits, and the main process starts another.")
            case host_messages.NewWorker():
                self._pool.add(message)
            case host_messages.WorkerLost(worker, why):
                self._pool.lose(worker, why)
            case host_messages.JobEnds():
                self._leases.job_is_ending = True
            case host_messages.StartedWorkers():
                self._openings.take(message)

    def _send(self, message: Message) -> None:
        try:
            self._main.send(message)
        except OSError:
            logger.debug("The main process has exited; this process exits, too.")

    # gRPC methods

    def _open_sources(self, request: bytes, context: Any) -> bytes:
        wanted = _parse(OpeningsRequest, request, context)
        with self._leasing:
            if not self._leases.has(wanted.client):
                context.abort(grpc.StatusCode.NOT_FOUND, f"{wanted.client} has sent no heartbeat")
        return self._openings.open(wanted, _CALL_TIMEOUT_S).encode()

    def _load(self, requests: Iterator[bytes], _context: Any) -> bytes:
        """Receive a pickled source, and pass it to the main process, which unpickles it.

        The digest of what has arrived names the source, so no rank gets an incomplete one.
        """
        fd = os.memfd_create("lightning_sm_snapshot", os.MFD_CLOEXEC)
        try:
            contents = snapshot_hash()
            for piece in requests:
                contents.update(piece)
                os.write(fd, piece)
            digest = contents.hexdigest()
            with self._loading:
                others = [known for known in self._snapshots if known != digest]
                wanted = self._openings.sources
                kept = [known for known in others[:-_NUM_SPARE] if known in wanted]
                self._snapshots = [*kept, *others[-_NUM_SPARE:], digest]
                self._send(host_messages.NewSnapshot(digest, self._snapshots, (fd,)))
        finally:
            os.close(fd)
        return b"{}"

    def _heartbeat(self, request: bytes, context: Any) -> bytes:
        beat = _parse(calls.HeartbeatRequest, request, context)
        try:
            with self._leasing:
                if beat.is_last:
                    self._leases.finish(beat.client, time.monotonic())
                    self._figures.pop(beat.client, None)
                else:
                    self._leases.heartbeat(beat.client, beat.world_size, time.monotonic())
                    if beat.figures is not None:
                        self._figures[beat.client] = beat.figures
                figures = dict(self._figures) if beat.wants_figures else {}
        except DataHostMismatchError as error:
            # This status is not final, so the trainer retries: the other ranks may finish in the meantime.
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return self._report(figures).encode()

    def _status(self, _request: bytes, _context: Any) -> bytes:
        """Report the state of the host; the caller needs no lease and gets none."""
        return structs.replace(self._report({}), channels=self._settings.channels).encode()

    def _report(self, figures: dict[str, RankFigures]) -> calls.HostReport:
        # Report the configured number of workers: the first heartbeat arrives before any worker is forked, and trainers
        # use the number to decide how many batches to request.
        return structs.replace(self._pool.report(self._settings.name, self._settings.workers), figures=figures)


def _parse(kind: type[_Request], request: bytes, context: Any) -> _Request:
    try:
        return decode(kind, request, kind.__name__, calls.MAX_REQUEST_BYTES)
    except WireError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise  # unreachable: abort raises


def main() -> None:
    """Run the server process. Its argument is the descriptor of the connection to the main process."""
    # A suspended process would not notice that its parent closed the connection, so have the kernel kill it.
    kill_with_parent()
    main_process = connection_to_parent()
    serve = main_process.receive()
    if isinstance(serve, host_messages.Serve):
        ServerProcess(main_process, serve.settings, serve.snapshots).run()


if __name__ == "__main__":
    run_and_exit(main)
