"""The process that runs the sampler of one loader: it goes on from epoch to epoch, as a sampler in a script does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.sampler import one_thread
from lightning_sm.data.ipc.host_messages import PassWasRun, RunPass, SamplerOutput
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import describe_exit, in_fork, prepare_to_abort, stacks_in
from lightning_sm.data.plan.samples import BatchPlan, digest
from lightning_sm.data.protocol.calls import LoaderPass, OrderSize, Problem

# Shares of the time for which a trainer waits: an error that says where the sampler stands must reach it before.
_PASS_SHARE = 0.7
_PROCESS_SHARE = 0.85

# A process that was told to abort gets this long to write its stacks.
_ABORT_S = 5.0


class _Waiting(NamedTuple):
    """A pass that is to be run, the memory for its order, and the seconds for which trainers wait."""

    loader_pass: LoaderPass
    fd: int
    timeout_s: float


@dataclass
class SamplerProcess:
    """The process of one sampler, as the main process sees it. It runs one pass after the other.

    Attributes:
        pid: Its process id.
        socket: The connection to it.
        stacks: Descriptor of the file into which it writes its stacks when it is aborted.
        deadline: Time of ``time.monotonic`` at which ``abort`` is due; None: it does nothing.
    """

    pid: int
    socket: MessageSocket
    stacks: int
    deadline: float | None = None
    _state: tuple[int, int] | None = None  # seed and limit of the passes that it has run
    _epoch: int = 0
    _is_aborted: bool = False
    _is_retired: bool = False
    _waiting: deque[_Waiting] = field(default_factory=deque)

    def can_run(self, loader_pass: LoaderPass) -> bool:
        """Return whether the state before a pass is one that it has, or can reach."""
        state = (loader_pass.seed, loader_pass.earlier_stop)
        return not self._is_retired and self._state in (None, state) and loader_pass.epoch >= self._epoch

    def run(self, loader_pass: LoaderPass, timeout_s: float) -> None:
        """Let it run a pass. If it has exited, ``end`` answers."""
        self._state = (loader_pass.seed, loader_pass.earlier_stop)
        self._epoch = loader_pass.epoch
        fd = os.memfd_create("lightning_sm_sampler_order", os.MFD_CLOEXEC)
        self._waiting.append(_Waiting(loader_pass, fd, timeout_s))
        if len(self._waiting) == 1:
            self._set_deadline()
        with contextlib.suppress(OSError):
            self.socket.send(RunPass(loader_pass, timeout_s, (fd,)))

    def retire(self) -> None:
        """Let it exit once it has run what it was told to run."""
        if not self._is_retired:
            self._is_retired = True
            self.socket.end()

    def outputs(self, send: Callable[[SamplerOutput], object]) -> None:
        """Receive the answers to passes, and send the orders on."""
        for message in self.socket.pending():
            if isinstance(message, PassWasRun):
                self._answer(message.why, send)
        self._set_deadline()

    def end(self, status: int, send: Callable[[SamplerOutput], object]) -> None:
        """Answer what is still waiting, now that the process has exited.

        Args:
            status: Its exit code, or minus the number of the signal.
            send: Sends an order on.
        """
        if select.select([self.socket], [], [], 0.0)[0]:
            self.outputs(send)
        stacks = stacks_in(self.stacks)
        while self._waiting:
            waiting = self._waiting[0]
            if self._is_aborted:
                what = "The passes of the sampler in earlier epochs"
                write_problem(waiting.fd, _late(what, waiting.timeout_s * _PROCESS_SHARE, stacks))
            self._answer("" if self._is_aborted else describe_exit(status), send)
        os.close(self.stacks)
        self.socket.close()

    def abort(self) -> None:
        """End it, because it takes too long; it writes its stacks if it can."""
        os.kill(self.pid, signal.SIGKILL if self._is_aborted else signal.SIGABRT)
        self.deadline = None if self._is_aborted else time.monotonic() + _ABORT_S
        self._is_aborted = True

    def _answer(self, why: str, send: Callable[[SamplerOutput], object]) -> None:
        waiting = self._waiting.popleft()
        send(SamplerOutput(waiting.loader_pass, why, (waiting.fd,)))
        os.close(waiting.fd)

    def _set_deadline(self) -> None:
        if not self._is_aborted:
            allowed = self._waiting[0].timeout_s * _PROCESS_SHARE if self._waiting else None
            self.deadline = None if allowed is None else time.monotonic() + allowed


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
    while isinstance(request := requests.receive(), RunPass):
        (fd,) = request.fds
        why = ""
        if problem is None:
            try:
                loader.advance_sampler(request.loader_pass)
            except Exception as error:  # noqa: BLE001  # the error of the user's sampler is sent to the trainers
                # Within a pass that failed, the state is unknown: there is no later pass.
                problem = Problem.of(error)
        if problem is not None:
            write_problem(fd, problem)
        else:
            allowed_s = request.timeout_s * _PASS_SHARE
            try:
                in_fork(partial(_write_order, fd, loader, request.loader_pass), allowed_s)
            except TimeoutError as error:
                write_problem(fd, _late("A pass of the sampler", allowed_s, str(error)))
            except ChildProcessError as error:
                why = str(error)
        os.close(fd)
        requests.send(PassWasRun(why))


def no_order(loader_pass: LoaderPass) -> SamplerOutput:
    """Return the answer for loaders that were replaced while the request was on its way; the caller closes ``fds``."""
    fd = os.memfd_create("lightning_sm_sampler_order", os.MFD_CLOEXEC)
    write_problem(fd, Problem("DataServiceError", f"The loaders of {loader_pass.opening} are no longer open."))
    return SamplerOutput(loader_pass, "", (fd,))


def write_problem(fd: int, problem: Problem) -> None:
    """Write the reason why there is no order into the memory for it."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, problem.encode() + b"\n", 0)


def _late(what: str, allowed_s: float, stacks: str) -> Problem:
    text = (
        f"{what} did not end within {allowed_s:.0f} s. {stacks}\n"
        "If the sampler takes that long, raise data_service.batch_timeout_s."
    )
    return Problem("DataTimeoutError", text)


def _write_order(fd: int, loader: ServedLoader, loader_pass: LoaderPass) -> None:
    try:
        keys, offsets, is_cut, own_digest = loader.sampler_order(loader_pass)
        num_batches = BatchPlan(keys, offsets, 0, 1).num_steps  # raises if a batch is empty
    except Exception as error:  # noqa: BLE001  # the error of the user's sampler is sent to the trainers
        write_problem(fd, Problem.of(error))
        return
    order = keys if offsets is None else np.concatenate([keys, offsets])
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(OrderSize(len(keys), num_batches, digest(order) + own_digest, is_cut=is_cut).encode() + b"\n")
        file.write(np.ascontiguousarray(order, "<i8").data)
