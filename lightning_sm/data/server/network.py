"""The network processes of a data host, as the server process starts them and answers their requests.

One interpreter sends about 2 GB/s, however many cores there are. The stream of a rank may go to a network process; all
other calls, and the workers, stay with the server process. So all ranks share all workers.

A network process has slots of the workers and requests of the ranks. If it exits, so does the server process, with
everything that it shares with it, and the main process starts both again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lightning_sm._untested import NETWORK_PROCESSES
from lightning_sm.data.ipc import host_messages
from lightning_sm.data.ipc.messages import Message, NothingReceivedError
from lightning_sm.data.ipc.processes import describe_exit, start_module
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.server.stream import Start, nothing
from lightning_sm.data.server.worker_pool import Answer, ServedRange
from lightning_sm.data.settings import HostSettings
from lightning_sm.errors import DataServiceError, WireError

logger = logging.getLogger(__name__)

_MODULE = "lightning_sm.data.server.network_process"

# A network process that has sent nothing for this time gets a ping, and is killed if it does not answer for as long. It
# has slots of the workers, without which these cannot continue.
_SILENT_S = 10.0
_STOP_TIMEOUT_S = 2.0


class NetworkProcesses:
    """The network processes, and which rank's stream goes to which of them.

    Args:
        settings: Settings of the data host, with the address at which it listens.
        start: Has a request answered.
        worker_ids: Returns the ids of the current workers.
    """

    def __init__(self, settings: HostSettings, start: Start, worker_ids: Callable[[], list[int]]) -> None:
        host = settings.address.rpartition(":")[0]
        own = replace(settings, address=f"{host}:0")
        # The server process is one of them. A Unix socket has no ports for others.
        number = 1 if settings.address.startswith("unix") else settings.network_processes
        self._processes = [_ProcessLink(own, start, worker_ids) for _ in range(number - 1)]
        self._clients: dict[str, int] = {}
        if self._processes:
            logger.info("%s", NETWORK_PROCESSES)

    def port_for(self, client: str) -> int:
        """Return the port for the stream of a rank; 0: that of the server process.

        Args:
            client: The rank. Ranks take turns, in the order in which they are seen first; the server process, which has
                other work, comes last.
        """
        place = self._clients.setdefault(client, len(self._clients)) % (len(self._processes) + 1)
        return self._processes[place].port if place < len(self._processes) else 0

    def close(self) -> None:
        """End all network processes."""
        for process in self._processes:
            process.close()
        for process in self._processes:
            process.join()


class _ProcessLink:
    """The connection to a network process, with its requests and the slots that it has."""

    def __init__(self, settings: HostSettings, start: Start, worker_ids: Callable[[], list[int]]) -> None:
        self.port = 0  # while it does not listen
        self._start = start
        self._worker_ids = worker_ids
        self._lock = threading.Lock()
        self._is_closed = False
        self._cancels: dict[int, Callable[[], None]] = {}  # by number of the request
        self._releases: dict[int, Callable[[], None]] = {}
        self._rings: set[int] = set()  # by worker id
        self._process, self._socket = start_module(_MODULE)
        # Sent by a thread: the thread that answers a request must not wait for a network process that is stopped.
        self._outbox: queue.SimpleQueue[Message | tuple[int, Answer]] = queue.SimpleQueue()
        self._outbox.put(host_messages.Serve(settings))
        threading.Thread(target=self._send_all, name="to network process", daemon=True).start()
        self._receiver = threading.Thread(target=self._receive_all, name="from network process", daemon=True)
        self._receiver.start()

    def close(self) -> None:
        """End the network process; ``join`` waits for that."""
        self._is_closed = True
        self._socket.shutdown()

    def join(self) -> None:
        """Wait until the network process has ended, but not for long."""
        self._receiver.join(_STOP_TIMEOUT_S)

    def _receive_all(self) -> None:
        is_asked = False
        while True:
            try:
                message = self._socket.receive(_SILENT_S)
            except NothingReceivedError:
                if is_asked:
                    self._process.kill()
                elif self.port:
                    is_asked = True
                    self._outbox.put(host_messages.Ping())
                continue
            is_asked = False
            if message is None:
                break
            self._handle(message)
        how = describe_exit(self._process.wait())
        if not self._is_closed:
            raise DataServiceError(f"A network process of the data host {how}.")  # which ends this process

    def _handle(self, message: Message) -> None:
        match message:
            case host_messages.Listening(address):
                self.port = int(address.rpartition(":")[2])
            case host_messages.Fetch(number, stream, encoded_spec):
                with self._lock:  # an answer that comes at once is not sent before this is done
                    try:
                        cancel = self._start((id(self), stream), encoded_spec, partial(self._answer, number))
                        self._cancels[number] = cancel
                    except WireError as error:
                        self._answer(number, Failure("WireError", str(error)))
            case host_messages.CancelFetch(number):
                with self._lock:
                    cancel = self._cancels.pop(number, nothing)
                cancel()
            case host_messages.Release(number):
                with self._lock:
                    release = self._releases.pop(number)
                release()

    def _answer(self, number: int, answer: Answer) -> None:
        self._outbox.put((number, answer))

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # it has exited, which the other thread notices
            while True:
                message = self._outbox.get()
                if isinstance(message, tuple):
                    self._send_answer(*message)
                else:
                    self._socket.send(message)

    def _send_answer(self, number: int, answer: Answer) -> None:
        with self._lock:
            self._cancels.pop(number, None)
            if isinstance(answer, ServedRange):
                self._releases[number] = answer.release
        if not isinstance(answer, ServedRange):
            self._socket.send(host_messages.FetchAnswer(number, answer))
            return
        if answer.worker not in self._rings:
            live = self._worker_ids()
            self._rings = {answer.worker, *(self._rings & set(live))}
            ring = answer.ring
            self._socket.send(host_messages.NewRing(answer.worker, live, ring.num_slots, ring.slot_bytes, (ring.fd,)))
        self._socket.send(
            host_messages.FetchAnswer(
                number, answer.built, answer.worker, answer.slot, answer.queue_s, answer.encoded_batches
            )
        )
