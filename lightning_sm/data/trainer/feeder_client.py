"""The training process's side of its feeder: starts it, asks it, hears it. Imports neither gRPC nor torch."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from lightning_sm import errors
from lightning_sm.data.ipc.messages import RELEASE, Message, Released
from lightning_sm.data.ipc.processes import describe_exit, start_module
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.settings import Credentials

logger = logging.getLogger(__name__)

# While something is awaited for long, say so this often.
_REPORT_PERIOD_S = 30.0
_EXIT_TIMEOUT_S = 10.0


class FeederClient:
    """A feeder process and the connection to it.

    Args:
        addresses: Data hosts.
        credentials: Job, token, TLS.
        client: Facts about this rank: "client" (its name), "world_size".
        hedge_factor: See ``DataServiceSettings``.
    """

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials, client: Mapping[str, Any], hedge_factor: float
    ) -> None:
        releases, self._releases = os.pipe()
        self._process, self._socket = start_module("lightning_sm.data.feeder.process", releases)
        os.close(releases)
        self._pid = os.getpid()
        self._inboxes: dict[int, deque[Message]] = {}
        self._opened: dict[str, dict[str, Any]] = {}
        self._problem: Message | None = None
        self._states: list[dict[str, Any]] = []
        self._lengths: dict[int, Message] = {}
        self._num_lengths = 0
        self._num_rings = 0
        self._num_passes = 0
        settings = {
            "addresses": list(addresses),
            "credentials": asdict(credentials),
            "client": dict(client),
            "hedge_factor": hedge_factor,
        }
        self._socket.send("feed", settings=settings)

    def open(self, opening: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Let all data hosts open loaders.

        Args:
            opening: Name of the opening.
            request: What to open.
            timeout_s: Seconds until the first host must have done so.

        Raises:
            DataServiceError: A host failed, the hosts disagree, or none answered in time.

        Returns:
            What they opened.
        """
        self._send("open", **request)
        deadline = time.monotonic() + timeout_s
        what = f"{request['loaders']}_dataloader()" if request.get("loaders") else f"setup({request.get('stage')!r})"
        while opening not in self._opened:
            self._raise_problem(None)
            if not self._hear(min(_REPORT_PERIOD_S, deadline - time.monotonic())):
                report = self.describe()
                if time.monotonic() >= deadline:
                    raise errors.DataHostUnreachableError(
                        f"No data host has run {what} within {timeout_s:.0f} s (data_service.startup_timeout_s).\n"
                        f"{report}\nLook at the logs of the data hosts; if they download data, allow more time."
                    )
                logger.info("Waiting for the data hosts to run %s:\n%s", what, report)
        self._raise_problem(None)
        return self._opened.pop(opening)

    def add_ring(self, ring: Ring) -> int:
        """Share a ring with the feeder, and return its number.

        Args:
            ring: The ring.
        """
        self._num_rings += 1
        self._socket.send(
            "ring", fds=[ring.fd], ring=self._num_rings, num_slots=ring.num_slots, slot_bytes=ring.slot_bytes
        )
        return self._num_rings

    def start_pass(self, facts: Mapping[str, Any]) -> int:
        """Begin a pass over a loader, and return its number.

        Args:
            facts: What the feeder must know of it.
        """
        self._num_passes += 1
        self._inboxes[self._num_passes] = deque()
        self._send("start", pass_id=self._num_passes, **facts)
        return self._num_passes

    def length(self, facts: Mapping[str, Any], timeout_s: float) -> tuple[int, int]:
        """Return the steps of a pass that only the user's code knows, and the batches of all ranks that it leaves out.

        Args:
            facts: The pass, as for ``start_pass``.
            timeout_s: Seconds to wait for the data hosts to run the sampler, or to count the batches of a dataset.

        Raises:
            DataServiceError: The sampler failed, or did not end in time.
        """
        number = self._num_lengths = self._num_lengths + 1
        self._send("measure", number=number, **facts)
        deadline = time.monotonic() + timeout_s
        while number not in self._lengths:
            self._raise_problem(None)
            if not self._hear(min(_REPORT_PERIOD_S, deadline - time.monotonic())) and time.monotonic() >= deadline:
                is_dataset = facts["order"] == "shards"
                advice = "set data_service.batches_per_epoch, then nobody counts" if is_dataset else ""
                raise errors.DataTimeoutError(
                    f"No data host has run a {'dataset' if is_dataset else 'sampler'} to its end within "
                    f"{timeout_s:.0f} s (data_service.batch_timeout_s).\n{self.describe()}\n"
                    f"Does it end at all? {advice or 'Give it an end, or allow more time'}."
                )
        answer = self._lengths.pop(number)
        if "error" in answer.facts:
            raise _error(answer)
        return int(answer.facts["num_steps"]), int(answer.facts["num_dropped"])

    def close_pass(self, pass_id: int) -> list[Message]:
        """End a pass, and return the batches that came but were not taken; may be called from a finalizer.

        Args:
            pass_id: The pass.
        """
        inbox = self._inboxes.pop(pass_id, deque())
        self._write(Released.PASS, pass_id, 0)
        return [message for message in inbox if message.kind == "batch"]

    def next(self, pass_id: int, timeout_s: float) -> Message:
        """Wait for the next batch of a pass.

        Args:
            pass_id: The pass.
            timeout_s: Seconds to wait.

        Raises:
            DataServiceError: The batch cannot come, or did not in time.

        Returns:
            A message of kind "batch" or "end".
        """
        inbox = self._inboxes[pass_id]
        deadline = time.monotonic() + timeout_s
        while not inbox or inbox[0].kind == "error":
            self._raise_problem(pass_id)
            if not self._hear(min(_REPORT_PERIOD_S, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    self._raise_late(pass_id, timeout_s)
                logger.warning("Waiting for a batch:\n%s", self.describe())
        return inbox.popleft()

    def take(self, pass_id: int, step: int) -> None:
        """Tell that every step of a pass below a number was taken.

        Args:
            pass_id: The pass.
            step: The number.
        """
        self._write(Released.STEP, pass_id, step)

    def release(self, ring: int, slot: int) -> None:
        """Give a slot back; may be called from a finalizer, in any thread.

        Args:
            ring: Number of the ring.
            slot: The slot.
        """
        self._write(Released.SLOT, ring, slot)

    def state(self) -> dict[str, Any]:
        """Return what the feeder knows of hosts and passes."""
        self._send("state")
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        self._states.clear()
        while not self._states:
            if not self._hear(deadline - time.monotonic()):
                raise errors.DataServiceError(f"The feeder process did not answer within {_EXIT_TIMEOUT_S:.0f} s.")
        return self._states.pop()

    def describe(self) -> str:
        """Return a table of the data hosts, for messages."""
        state = self.state()
        lines = []
        for host in state["hosts"]:
            busy = f", {host['busy']} of {host['workers']} workers busy" if host["workers"] is not None else ""
            why = f" ({host['why']})" if host["why"] else ""
            lines.append(f"  {host['name']}: {host['state']}{why}{busy}, {host['in_flight']} batches asked")
        for asked in state["passes"]:
            where = ", ".join(f"{request['host']} for {request['for_s']:.1f} s" for request in asked["asked"])
            lines.append(
                f"  awaited: step {asked['waiting_for']}, asked of {where or 'nobody'}; {asked['ready']} ready"
            )
        return "\n".join(lines)

    def close(self, outcome: str) -> None:
        """Tell the data hosts how the training ended, and end the feeder.

        Args:
            outcome: How it ended, for the data hosts' logs.
        """
        if self._releases < 0 or os.getpid() != self._pid:
            return
        try:
            self._socket.send("finish", outcome=outcome)
        except OSError:
            logger.debug("The feeder is gone already.")
        self._socket.close()
        os.close(self._releases)
        self._releases = -1
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Process id of the feeder."""
        return self._process.pid

    def _send(self, kind: str, **facts: Any) -> None:
        try:
            self._socket.send(kind, **facts)
        except OSError:
            self._raise_ended()

    def _write(self, kind: Released, number: int, value: int) -> None:
        """Tell the feeder something without taking a lock: a finalizer may interrupt whoever holds it."""
        # A forked child inherits the arrays, but what it drops the training process may still use.
        if self._releases < 0 or os.getpid() != self._pid:
            return
        try:
            os.write(self._releases, RELEASE.pack(kind, number, value))
        except BrokenPipeError:
            logger.debug("The feeder is gone.")

    def _hear(self, timeout_s: float) -> bool:
        """Sort in the next message; False if none came in time."""
        try:
            message = self._socket.receive(max(0.0, timeout_s))
        except TimeoutError:
            return False
        if message is None:
            self._raise_ended()
        elif message.kind == "opened":
            self._opened[message.facts["opening"]] = message.facts
        elif message.kind == "state":
            self._states.append(message.facts)
        elif message.kind == "length":
            self._lengths[message.facts["number"]] = message
        elif message.kind == "error" and message.facts["pass_id"] is None:
            self._problem = message
        elif (inbox := self._inboxes.get(message.facts["pass_id"])) is not None:
            inbox.append(message)
        elif message.kind == "batch":  # of a pass that was closed meanwhile
            self.release(message.facts["ring"], message.facts["slot"])
        return True

    def _raise_problem(self, pass_id: int | None) -> None:
        problem = self._problem
        if problem is None and pass_id is not None and self._inboxes[pass_id]:
            first = self._inboxes[pass_id][0]
            problem = first if first.kind == "error" else None
        if problem is not None:
            raise _error(problem)

    def _raise_late(self, pass_id: int, timeout_s: float) -> NoReturn:
        state = self.state()
        report = self.describe()
        is_anyone_up = any(host["state"] == "up" for host in state["hosts"])
        error = errors.DataTimeoutError if is_anyone_up else errors.DataHostUnreachableError
        first = "A batch has not come" if is_anyone_up else "All data hosts are gone, and no batch has come,"
        raise error(
            f"{first} within {timeout_s:.0f} s (data_service.batch_timeout_s).\n{report}\n"
            "Look at the logs of the data hosts for why they are slow or gone."
        )

    def _raise_ended(self) -> NoReturn:
        status = self._process.wait()
        raise errors.DataServiceError(
            f"The feeder process of this rank (pid {self._process.pid}) {describe_exit(status)}. Without it, this rank "
            "receives no batches."
        )


def _error(message: Message) -> Exception:
    name = message.facts["error"]
    kind: type[Exception] = getattr(errors, name, errors.DataServiceError)
    return kind(message.facts["text"])
