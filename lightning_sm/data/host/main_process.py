"""The main process of a data host: owns the user's DataModule, its workers and the network process.

It has no threads and never loads gRPC, so that it may fork its workers. When anything that it started dies, it starts
it again; when it dies itself, everything goes with it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import cloudpickle
import numpy as np

from lightning_sm._log import show_log_lines
from lightning_sm.data.host.datamodule import ServedModule
from lightning_sm.data.host.worker import run_worker
from lightning_sm.data.ipc.messages import Message, MessageSocket
from lightning_sm.data.ipc.processes import ending, run_and_leave, with_import_path
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.settings import HostSettings
from lightning_sm.errors import DataServiceError
from lightning_sm.job.stopping import GENTLE_SIGNAL

logger = logging.getLogger(__name__)

# One slot is filled while the other is sent.
_SLOTS_PER_WORKER = 2

# How often in a row a network process may die before it has answered a trainer.
_MAX_NETWORK_STARTS = 5

# The network process hands out what it has begun to send, and a last word to the trainers.
_STOP_TIMEOUT_S = 5.0

_LISTING_FACTS = ("seed", "epoch", "pass_index", "num_shards")
_TERMINATED = Message("finished", {"reason": "it was terminated (SIGTERM)"})
_NOT_NEEDED = Message("finished", {"reason": "the job was stopped before anything was served"})


class _Terminated(BaseException):
    """Ends a hook of the user; no ``except Exception`` of the user's keeps it."""


@dataclass
class _Child:
    pidfd: int
    ended: Callable[[int], None]


class HostProcess:
    """Serves a DataModule from the current process until the trainers have finished.

    It has failed if the user's hooks did so when it was last asked to open loaders, and then the training: it could not
    do without.

    Args:
        datamodule: The user's DataModule.
        settings: Address, workers, limits, credentials.
        listening: Called with the address once trainers can connect.
    """

    def __init__(self, datamodule: Any, settings: HostSettings, listening: Callable[[str], None]) -> None:
        self._module = ServedModule(datamodule)
        self._settings = settings
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        # By id: process id. By number: id of the newest, which is replaced when it dies.
        self._workers: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._num_forks = 0
        self._network_starts = 0
        self._network: MessageSocket | None = None
        self._outcome: Message | None = None
        self._is_in_hook = False
        self._is_job_ending = False
        # Why the last opening failed; trainers go no further while one does.
        self._problem: dict[str, str] | None = None
        self._has_training_succeeded = False

    def serve(self, until: MessageSocket | None = None) -> None:
        """Serve until the trainers have finished, until SIGTERM, or until the other end of a socket is closed.

        Args:
            until: The socket, if any.

        Raises:
            DataServiceError: The host cannot serve: its address is taken, no trainer ever came, or the user's hooks
                failed.
        """
        if until is not None:
            self._selector.register(until, selectors.EVENT_READ, self._stop)
        self._start_network()
        wakened, waker = socket.socketpair()
        waker.setblocking(False)
        self._selector.register(wakened, selectors.EVENT_READ, lambda: self._wakened(wakened))
        # First: a signal that is only noted would not end the wait.
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(GENTLE_SIGNAL, self._on_gentle_signal)
        try:
            outcome = self._await_outcome()
        except _Terminated:
            outcome = self._outcome or _NOT_NEEDED
        finally:
            self._hear_finished_trainers()
            self._close()
            # For good: the interpreter takes a second to leave, for which it restores what is not ignored, and a signal
            # that comes then, as the job is over, must not replace the exit code.
            for signum in (signal.SIGTERM, GENTLE_SIGNAL):
                signal.signal(signum, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            wakened.close()
            waker.close()
        if "error" in outcome.facts:
            raise DataServiceError(outcome.facts["error"])
        # Whoever closes a host by hand has seen the error on the other end.
        if until is None and self._problem is not None and not self._has_training_succeeded:
            raise self._failure(self._problem)
        logger.info("The data host leaves: %s", outcome.facts["reason"])

    def _failure(self, problem: dict[str, str]) -> DataServiceError:
        # The launcher looks for the first traceback: the user's own error is the reason of the failure.
        logger.error("Data host %s failed in %s:\n%s", self._settings.name, problem["where"], problem["text"])
        return DataServiceError(
            f"Data host {self._settings.name} could not open what was asked for, and the training failed: "
            f"{problem['where']} raised {_last_line(problem['text'])}"
        )

    def _await_outcome(self) -> Message:
        while True:
            for key, _ in self._selector.select():
                key.data()
                if self._outcome is not None:
                    return self._outcome

    def _stop(self) -> None:
        self._outcome = Message("finished", {"reason": "it was closed"})

    def _on_sigterm(self, *_: object) -> None:
        """Leave at the next chance; a hook of the user, which may download for hours, is interrupted."""
        self._outcome = _TERMINATED
        if self._is_in_hook:
            raise _Terminated

    def _on_gentle_signal(self, *_: object) -> None:
        """The job ends, but trainers need batches until all of them have come to save a checkpoint."""
        self._is_job_ending = True
        if self._is_in_hook and not self._module.loaders:
            raise _Terminated

    def _wakened(self, wakened: socket.socket) -> None:
        """Do what a signal asked for that only took a note and ended the wait."""
        wakened.recv(4096)
        if self._is_job_ending:
            self._send("job_ends")

    # The network process

    def _start_network(self) -> None:
        self._network_starts += 1
        self._network, theirs = MessageSocket.pair()
        with theirs:
            command = [sys.executable, "-m", "lightning_sm.data.server.process", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=with_import_path())
        self._watch(process.pid, lambda status: self._network_ended(process, status))
        self._network.send("serve", settings=asdict(self._settings))
        for opening, reply in self._module.replies.items():
            self._network.send("opened", opening=opening, **reply)
        if self._is_job_ending:
            self._network.send("job_ends")
        self._selector.register(self._network, selectors.EVENT_READ, self._hear_network)

    def _hear_network(self) -> None:
        network = self._network
        if network is None:
            return
        for message in self._pending(network):
            if message.kind == "listening":
                # Where trainers will look for it, should the network process have to be started again.
                self._settings = replace(self._settings, address=message.facts["address"])
                self._listening(message.facts["address"])
            elif message.kind == "open":
                self._network_starts = 0
                self._open(message.facts)
            elif message.kind == "list":
                self._list(message.facts)
            elif message.kind == "kill":
                self._kill(message.facts["worker"])
            elif message.kind == "finished":
                self._outcome = message
        if network.is_at_end:
            self._selector.unregister(network)

    def _hear_finished_trainers(self) -> None:
        """Hear what came before or together with SIGTERM, which follows when the trainers have left."""
        if self._network is not None and _wait(self._network.fileno(), 0.0):
            self._pending(self._network)

    def _pending(self, network: MessageSocket) -> list[Message]:
        messages = network.pending()
        # Before anything else that came: a hook, which the other messages may call, is interrupted.
        successes = (message.facts["is_success"] for message in messages if message.kind == "trainer_finished")
        self._has_training_succeeded |= any(successes)
        return messages

    def _network_ended(self, process: subprocess.Popen[bytes], status: int) -> None:
        process.returncode = status
        if self._outcome is not None:
            return
        if self._network_starts >= _MAX_NETWORK_STARTS:
            reason = f"its network process {ending(status)}, {self._network_starts} times in a row"
            self._outcome = Message("finished", {"error": f"Data host gives up: {reason}."})
            return
        logger.warning("The network process %s; starting it again.", ending(status))
        if self._network is not None:
            if self._network.fileno() in {key.fd for key in self._selector.get_map().values()}:
                self._selector.unregister(self._network)
            self._network.close()
        self._start_network()
        self._fork_workers()

    def _open(self, request: dict[str, Any]) -> None:
        before = set(self._module.loaders)
        self._is_in_hook = True
        try:
            reply = self._module.open(request)
        finally:
            self._is_in_hook = False
        if set(self._module.loaders) != before:
            self._fork_workers()
        self._problem = reply if "error" in reply else None
        if "error" in reply:
            logger.warning("%s failed, as trainers are told: %s", reply["where"], _last_line(reply["text"]))
        self._send("opened", opening=request["opening"], **reply)

    # Children

    def _fork_workers(self) -> None:
        for number in range(self._settings.workers if self._module.loaders else 0):
            self._fork_worker(number)

    def _fork_worker(self, number: int) -> None:
        self._num_forks += 1
        worker_id = self._num_forks
        ring = Ring.create(_SLOTS_PER_WORKER, self._settings.max_batch_bytes)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:

            def serve() -> None:
                ours.close()  # with its own copy of the other end, a worker would never see that end closed
                run_worker(theirs, ring, self._module.loaders, number, self._settings.workers)

            pid = self._fork(serve)
            facts = {"worker": worker_id, "number": number, "openings": list(self._module.loaders)}
            sizes = {"num_slots": ring.num_slots, "slot_bytes": ring.slot_bytes}
            self._send("worker", fds=(ours.fileno(), ring.fd), **facts, **sizes, pid=pid)
        ring.close()
        self._workers[worker_id], self._newest[number] = pid, worker_id
        self._watch(pid, lambda status: self._worker_ended(worker_id, number, status))

    def _fork(self, target: Callable[[], None]) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGTERM, GENTLE_SIGNAL):
                signal.signal(signum, signal.SIG_DFL)
            if self._network is not None:
                self._network.close()
            target()
            code = 0
        except BaseException:  # noqa: BLE001  # a forked child must never return into its parent's code
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def _worker_ended(self, worker_id: int, number: int, status: int) -> None:
        del self._workers[worker_id]
        is_heard = self._send("lost", worker=worker_id, why=ending(status))
        # Others were let go because newer loaders were opened, or ended with their network process.
        if self._outcome is None and self._newest[number] == worker_id and is_heard:
            logger.warning("Worker %d %s; starting another one.", number, ending(status))
            self._fork_worker(number)

    def _kill(self, worker_id: int) -> None:
        if worker_id in self._workers:
            os.kill(self._workers[worker_id], signal.SIGKILL)

    def _list(self, request: dict[str, Any]) -> None:
        """Run a sampler in a child, so that each host starts from the same state, and none waits for it."""
        fd = os.memfd_create("lightning_sm_listing", os.MFD_CLOEXEC)

        def listing() -> None:
            with os.fdopen(os.dup(fd), "wb") as file:
                try:
                    loader = self._module.loaders[request["opening"]][request["loader"]]
                    keys, offsets = loader.listing(*(request[name] for name in _LISTING_FACTS))
                except Exception:  # noqa: BLE001  # whatever the user's sampler raises belongs to the trainers
                    file.write(json.dumps({"text": traceback.format_exc()}).encode() + b"\n")
                    return
                sizes = {"num_keys": len(keys), "num_offsets": 0 if offsets is None else len(offsets)}
                file.write(json.dumps(sizes).encode() + b"\n")
                for part in (keys, offsets):
                    file.write(b"" if part is None else np.ascontiguousarray(part, "<i8").tobytes())

        def ended(status: int) -> None:
            self._send("listed", fds=(fd,), listing=request["listing"], why=ending(status) if status else None)
            os.close(fd)

        self._watch(self._fork(listing), ended)

    def _watch(self, pid: int, ended: Callable[[int], None]) -> None:
        child = _Child(os.pidfd_open(pid), ended)
        self._children[pid] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._reap(pid))

    def _reap(self, pid: int) -> None:
        child = self._children.pop(pid)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        _, status = os.waitpid(pid, 0)
        child.ended(os.waitstatus_to_exitcode(status))

    def _send(self, kind: str, fds: tuple[int, ...] = (), **facts: Any) -> bool:
        if self._network is None:
            return False
        try:
            self._network.send(kind, fds=fds, **facts)
        except OSError:
            logger.debug("The network process is gone; it will be started again.")
            return False
        return True

    def _close(self) -> None:
        """End all children; the network process first, which tells the trainers."""
        if self._network is not None:
            self._network.close()
        for pid in self._workers.values():
            os.kill(pid, signal.SIGKILL)
        for pid, child in list(self._children.items()):
            if not _wait(child.pidfd, _STOP_TIMEOUT_S):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(child.pidfd)
        self._children.clear()
        self._selector.close()
        self._module.leave()


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "")


def _wait(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def main() -> None:
    """Serve a DataModule for a ``DataHost`` in another process; the argument is the connection to it."""
    # The process that made the DataHost decides what Ctrl-C means; it closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_log_lines()
    owner = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    message = owner.receive()
    if message is None:
        return
    try:
        datamodule = cloudpickle.loads(message.payload)
        host = HostProcess(
            datamodule,
            HostSettings.from_json(message.facts["settings"]),
            lambda address: owner.send("listening", address=address),
        )
        host.serve(until=owner)
    except Exception as error:
        owner.send("failed", text="".join(traceback.format_exception(error)))
        raise


if __name__ == "__main__":
    run_and_leave(main)
