"""A network process of a data host: sends batches to some of the ranks, with an interpreter and a core of its own.

Each request is passed on to the server process, which has the workers. The batches are read where they lie: in the
memory of the workers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from itertools import count

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.ipc import host_messages
from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.processes import connection_to_parent, run_and_exit
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.spec import StreamEnd
from lightning_sm.data.server.listener import Listener
from lightning_sm.data.server.peers import TrustedPeers
from lightning_sm.data.server.stream import FetchMethod
from lightning_sm.data.server.worker_pool import Answer, ServedRange
from lightning_sm.data.settings import HostSettings

_STOP_TIMEOUT_S = 1.0


class NetworkProcess:
    """The gRPC server of a network process.

    Args:
        server: Connection to the server process.
        settings: Address, credentials.
    """

    def __init__(self, server: MessageSocket, settings: HostSettings) -> None:
        self._server = server
        self._settings = settings
        self._rings: dict[int, Ring] = {}  # by worker id
        self._lock = threading.Lock()
        self._numbers = count()
        self._answers: dict[int, Callable[[Answer], None]] = {}
        self._fetch = FetchMethod(self._start)

    def run(self) -> None:
        """Serve until the server process closes the connection."""
        listener = Listener({"Fetch": self._fetch.handler()}, self._settings, TrustedPeers(self._settings))
        listener.start()
        self._server.send(host_messages.Listening(listener.address))
        while (message := self._server.receive()) is not None:
            self._handle(message)
        self._fetch.close()
        listener.stop(_STOP_TIMEOUT_S)

    def _handle(self, message: Message) -> None:
        match message:
            case host_messages.NewRing():
                live = set(message.live_workers)
                self._rings = {worker: ring for worker, ring in self._rings.items() if worker in live}
                self._rings[message.worker] = Ring(message.fds[0], message.num_slots, message.slot_bytes)
            case host_messages.FetchAnswer(
                number, host_messages.BuiltRange() as built, worker, slot, queue_s, encoded_batches
            ):
                release = partial(self._send, host_messages.Release(number))
                self._answer(
                    number, ServedRange(built, encoded_batches, worker, self._rings[worker], slot, queue_s, release)
                )
            case host_messages.FetchAnswer(number, Failure() | StreamEnd() as answer):
                self._answer(number, answer)
            case host_messages.Ping():
                self._send(message)

    def _start(self, client: object, encoded_spec: bytes, answer: Callable[[Answer], None]) -> Callable[[], None]:
        """Pass a request on to the server process."""
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
        self._send(host_messages.Fetch(number, id(client), encoded_spec))
        return partial(self._cancel, number)

    def _cancel(self, number: int) -> None:
        with self._lock:
            answer = self._answers.pop(number, None)
        if answer is not None:
            self._send(host_messages.CancelFetch(number))

    def _answer(self, number: int, answer: Answer) -> None:
        with self._lock:
            take = self._answers.pop(number, None)
        if take is not None:
            take(answer)
        elif isinstance(answer, ServedRange):  # it was cancelled in the meantime
            answer.release()

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the server process has exited; this process exits, too
            self._server.send(message)


def main() -> None:
    """Run the network process; the argument is the descriptor of the connection to the server process."""
    kill_with_parent()
    server = connection_to_parent()
    serve = server.receive()
    if isinstance(serve, host_messages.Serve):
        NetworkProcess(server, serve.settings).run()


if __name__ == "__main__":
    run_and_exit(main)
