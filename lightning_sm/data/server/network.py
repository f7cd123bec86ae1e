"""The network processes of a data host, as the server process starts them and answers their requests.

One interpreter sends about 2 GB/s, however many cores there are. The stream of a rank may go to a network process; all
other calls, and the workers, stay with the server process. So all ranks share all workers.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lightning_sm._untested import NETWORK_PROCESSES
from lightning_sm.data.ipc import host_messages
from lightning_sm.data.ipc.messages import Message, MessageSocket, NothingReceivedError
from lightning_sm.data.ipc.processes import describe_exit, start_module
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.server.stream import Start, nothing
from lightning_sm.data.server.worker_pool import Answer, ServedRange
from lightning_sm.data.settings import HostSettings
from lightning_sm.errors import WireError

logger = logging.getLogger(__name__)

_MODULE = "lightning_sm.data.server.network_process"

# A network process may exit this many times in a row before it has listened.
_MAX_STARTS = 5
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
        # The server process is one of them. A Unix socket is that of local workers, which serve the ranks of one host.
        number = 1 if settings.address.startswith("unix") else settings.network_processes
        self._processes = [_Supervisor(own, start, worker_ids) for _ in range(number - 1)]
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
            process.join(_STOP_TIMEOUT_S)


class _Supervisor(threading.Thread):
    """The supervisor of a network process: starts it, passes messages, and starts it again when it exits.

    The thread lives as long as the data host: the kernel kills a process when the thread that started it ends.
    """

    def __init__(self, settings: HostSettings, start: Start, worker_ids: Callable[[], list[int]]) -> None:
        super().__init__(name="network process", daemon=True)
        self.port = 0  # while it does not listen
        self._settings = settings
        self._start_request = start
        self._worker_ids = worker_ids
        self._lock = threading.Lock()
        self._socket: MessageSocket | None = None
        self._closed = threading.Event()
        self.start()

    def close(self) -> None:
        """End the network process; ``join`` waits for that."""
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                self._socket.shutdown()

    def run(self) -> None:
        num_failures = 0
        while num_failures < _MAX_STARTS and not self._closed.is_set():
            process, sock = start_module(_MODULE)
            with self._lock:
                self._socket = sock
            if self._closed.is_set():
                sock.shutdown()
            requests = _Requests(sock, self._start_request, self._worker_ids)
            self._answer_until_it_ends(process, sock, requests)
            num_failures = 0 if self.port else num_failures + 1
            self.port = 0
            requests.close()
            how = describe_exit(process.wait())
            with self._lock:
                self._socket = None
                sock.close()
            if not self._closed.is_set():
                logger.warning("A network process of the data host %s.", how)
        if not self._closed.is_set():
            logger.error(
                "A network process of the data host exited %d times in a row before listening. The server process "
                "now sends its batches. See the log lines above.",
                _MAX_STARTS,
            )

    def _answer_until_it_ends(self, process: subprocess.Popen[bytes], sock: MessageSocket, requests: _Requests) -> None:
        requests.send(host_messages.Serve(self._settings))
        is_asked = False
        while True:
            try:
                message = sock.receive(_SILENT_S)
            except NothingReceivedError:
                if is_asked:
                    process.kill()
                elif self.port:
                    is_asked = True
                    requests.send(host_messages.Ping())
                continue
            is_asked = False
            if message is None:
                return
            if isinstance(message, host_messages.Listening):
                self.port = int(message.address.rpartition(":")[2])
            else:
                requests.handle(message)


class _Requests:
    """The requests of one network process, and the slots that it has."""

    def __init__(self, sock: MessageSocket, start: Start, worker_ids: Callable[[], list[int]]) -> None:
        self._socket = sock
        self._start = start
        self._worker_ids = worker_ids
        self._lock = threading.Lock()
        self._is_closed = False
        self._cancels: dict[int, Callable[[], None]] = {}  # by number of the request
        self._releases: dict[int, Callable[[], None]] = {}
        self._rings: set[int] = set()  # by worker id
        # Sent by a thread: the thread that answers a request must not wait for a network process that is stopped.
        self._outbox: queue.SimpleQueue[Message | tuple[int, ServedRange] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="to network process", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, soon."""
        self._outbox.put(message)

    def handle(self, message: Message) -> None:
        """Do what the network process asks for."""
        match message:
            case host_messages.Fetch(number, stream, encoded_spec):
                self._cancels[number] = nothing  # the answer may come before the function that cancels it
                try:
                    cancel = self._start((id(self), stream), encoded_spec, partial(self._answer, number))
                except WireError as error:
                    self._answer(number, Failure("WireError", str(error)))
                    return
                with self._lock:
                    if number in self._cancels:
                        self._cancels[number] = cancel
            case host_messages.CancelFetch(number):
                with self._lock:
                    cancel = self._cancels.pop(number, nothing)
                cancel()
            case host_messages.Release(number):
                with self._lock:
                    release = self._releases.pop(number)
                release()

    def close(self) -> None:
        """Cancel all requests, and take back all slots: the process has ended."""
        with self._lock:
            self._is_closed = True
            functions = [*self._cancels.values(), *self._releases.values()]
            self._cancels.clear()
            self._releases.clear()
        for function in functions:
            function()
        self._outbox.put(None)

    def _answer(self, number: int, answer: Answer) -> None:
        with self._lock:
            self._cancels.pop(number, None)
            is_closed = self._is_closed
            if isinstance(answer, ServedRange) and not is_closed:
                self._releases[number] = answer.release
        if isinstance(answer, ServedRange):
            if is_closed:
                answer.release()
            else:
                self._outbox.put((number, answer))
        else:
            self.send(host_messages.FetchAnswer(number, answer))

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                if isinstance(message, tuple):
                    self._send_batches(*message)
                else:
                    self._socket.send(message)
        except OSError:
            logger.debug("A network process has exited; ``close`` follows.")

    def _send_batches(self, number: int, served: ServedRange) -> None:
        if served.worker not in self._rings:
            live = self._worker_ids()
            self._rings = {served.worker, *(self._rings & set(live))}
            self._socket.send(
                host_messages.NewRing(
                    served.worker, live, served.ring.num_slots, served.ring.slot_bytes, (served.ring.fd,)
                )
            )
        self._socket.send(
            host_messages.FetchAnswer(
                number, served.built, served.worker, served.slot, served.queue_s, served.encoded_batches
            )
        )
