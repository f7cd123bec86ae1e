"""The process that runs the sampler of one loader: it goes on from epoch to epoch, as a sampler in a script does."""

from __future__ import annotations

import contextlib
import os
import sched
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait

import numpy as np

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.sampler import one_thread
from lightning_sm.data.ipc.host_messages import RunSampler, SamplerOutput
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import describe_exit, in_fork, prepare_to_abort, stacks_in
from lightning_sm.data.plan.samples import BatchPlan, digest
from lightning_sm.data.protocol.calls import Crashed, LoaderPass, OrderSize, Problem

# Shares of the time for which a trainer waits: an error that says where the sampler stands must reach it before.
_PASS_SHARE = 0.7
_PROCESS_SHARE = 0.85

# A process that was told to abort gets this long to write its stacks.
_ABORT_S = 5.0


@dataclass
class SamplerProcess:
    """The process of one sampler, as the main process sees it. It runs one pass after the other.

    Attributes:
        pid: Its process id.
        socket: The connection to it.
        stacks: Descriptor of the file into which it writes its stacks when it is aborted.
        scheduler: Calls ``abort`` when a pass takes too long.
    """

    pid: int
    socket: MessageSocket
    stacks: int
    scheduler: sched.scheduler
    _deadline: sched.Event | None = None
    _state: tuple[int, int] | None = None  # seed and limit of the passes that it has run
    _epoch: int = 0
    _is_aborted: bool = False
    _is_retired: bool = False
    _waiting: deque[RunSampler] = field(default_factory=deque)

    def can_run(self, loader_pass: LoaderPass) -> bool:
        """Return whether the state before a pass is one that it has, or can reach."""
        state = (loader_pass.seed, loader_pass.earlier_stop)
        return not self._is_retired and self._state in (None, state) and loader_pass.epoch >= self._epoch

    def run(self, request: RunSampler) -> None:
        """Let it run a pass. If it has exited, ``end`` answers."""
        self._state = (request.loader_pass.seed, request.loader_pass.earlier_stop)
        self._epoch = request.loader_pass.epoch
        self._waiting.append(request)
        if len(self._waiting) == 1:
            self._begin_next()
        with contextlib.suppress(OSError):
            self.socket.send(request)

    def retire(self) -> None:
        """Let it exit once it has run what it was told to run."""
        if not self._is_retired:
            self._is_retired = True
            self.socket.end()

    def outputs(self, send: Callable[[SamplerOutput], object]) -> None:
        """Receive the answers to passes, and send them on."""
        for message in self.socket.pending():
            if isinstance(message, SamplerOutput):
                self._waiting.popleft()
                send(message)
                for fd in message.fds:
                    os.close(fd)
        self._begin_next()

    def end(self, status: int, send: Callable[[SamplerOutput], object]) -> None:
        """Answer what is still waiting, now that the process has exited.

        Args:
            status: Its exit code, or minus the number of the signal.
            send: Sends an answer on.
        """
        if wait([self.socket.fileno()], 0.0):
            self.outputs(send)
        stacks = stacks_in(self.stacks)
        for waiting in self._waiting:
            outcome: Crashed | Problem = Crashed(describe_exit(status))
            if self._is_aborted:
                what = "The passes of the sampler in earlier epochs"
                outcome = _late(what, waiting.timeout_s * _PROCESS_SHARE, stacks)
            send(SamplerOutput(waiting.loader_pass, outcome))
        self._waiting.clear()
        self._set_deadline(None)
        os.close(self.stacks)
        self.socket.close()

    def abort(self) -> None:
        """End it, because it takes too long; it writes its stacks if it can."""
        os.kill(self.pid, signal.SIGKILL if self._is_aborted else signal.SIGABRT)
        self._deadline = None
        self._set_deadline(None if self._is_aborted else _ABORT_S)
        self._is_aborted = True

    def _begin_next(self) -> None:
        """Give the pass that runs now its time."""
        if not self._is_aborted:
            self._set_deadline(self._waiting[0].timeout_s * _PROCESS_SHARE if self._waiting else None)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self.scheduler.cancel(self._deadline)
        self._deadline = None if seconds is None else self.scheduler.enter(seconds, 0, self.abort)


def run_sampler(sock: socket.socket, loader: ServedLoader, stacks: int) -> None:
    """Run passes over the sampler of a loader until the other end of the socket is closed.

    The state goes on from one epoch to the next. The order of a pass is found out in a fork, which leaves it as it was
    before the pass: so each pass of an epoch, the Trainer's or one by hand, begins with the same state, as often as it
    is requested.

    Args:
        sock: Connection to the main process.
        loader: The loader.
        stacks: Descriptor of a file for the stacks of this process.
    """
    kill_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_to_abort(stacks)
    one_thread()
    requests = MessageSocket(sock)
    problem: Problem | None = None
    while isinstance(request := requests.receive(), RunSampler):
        if problem is None:
            try:
                loader.advance_sampler(request.loader_pass)
            except Exception as error:  # noqa: BLE001  # the error of the user's sampler is sent to the trainers
                # Within a pass that failed, the state is unknown: there is no later pass.
                problem = Problem.of(error)
        fd = os.memfd_create("lightning_sm_sampler_order", os.MFD_CLOEXEC)
        outcome = problem or _order_in_fork(fd, loader, request)
        requests.send(SamplerOutput(request.loader_pass, outcome, (fd,)))
        os.close(fd)


def _order_in_fork(fd: int, loader: ServedLoader, request: RunSampler) -> OrderSize | Crashed | Problem:
    allowed_s = request.timeout_s * _PASS_SHARE
    outcome: OrderSize | Crashed | Problem
    try:
        outcome = in_fork(partial(_write_order, fd, loader, request.loader_pass), allowed_s)
    except TimeoutError as error:
        outcome = _late("A pass of the sampler", allowed_s, str(error))
    except ChildProcessError as error:
        outcome = Crashed(str(error))
    return outcome


def _late(what: str, allowed_s: float, stacks: str) -> Problem:
    text = (
        f"{what} did not end within {allowed_s:.0f} s. {stacks}\n"
        "If the sampler takes that long, raise data_service.batch_timeout_s."
    )
    return Problem("DataTimeoutError", text)


def _write_order(fd: int, loader: ServedLoader, loader_pass: LoaderPass) -> OrderSize | Problem:
    """Run the sampler of a loader for a pass, write its order into the memory for it, and return its size.

    Return the error of the user's sampler, if it raises one.
    """
    try:
        keys, offsets, is_cut, own_digest = loader.sampler_order(loader_pass)
        num_batches = BatchPlan(keys, offsets, 0, 1).num_steps  # raises if a batch is empty
    except Exception as error:  # noqa: BLE001  # the error of the user's sampler is sent to the trainers
        return Problem.of(error)
    order = keys if offsets is None else np.concatenate([keys, offsets])
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(np.ascontiguousarray(order, "<i8").data)
    return OrderSize(len(keys), num_batches, digest(order) + own_digest, is_cut=is_cut)
