"""The openings that ranks want on this data host, as tracked by its server process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from itertools import chain, islice

from lightning_sm.data.ipc.host_messages import KeepOpenings, StartedWorkers, StartWorkers
from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.openings import CallResult, Opening, OpeningsReply, OpeningsRequest


class Openings:
    """The openings of all ranks. The main process starts their workers, and openings that no rank wants are closed.

    Args:
        send: Sends a message to the main process.
        has_source: Returns whether the main process has the source with this digest.
        set_live: Called, in order, with the names of the openings that have workers or will get them.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        has_source: Callable[[str], bool],
        set_live: Callable[[Collection[str]], None],
    ) -> None:
        self._send = send
        self._has_source = has_source
        self._set_live = set_live
        self._condition = threading.Condition()
        self._wanted: dict[str, dict[str, Opening]] = {}  # by rank and name
        self._running: set[str] = set()
        self._opened: dict[str, Failure | CallResult | None] = {}

    @property
    def sources(self) -> set[str]:
        """Digests of the sources that ranks want."""
        with self._condition:
            return {opening.source for by_name in self._wanted.values() for opening in by_name.values()}

    def open(self, request: OpeningsRequest, timeout_s: float) -> OpeningsReply:
        """Open everything that a rank wants.

        Args:
            request: The openings that the rank wants from now on.
            timeout_s: Maximum seconds to wait for the main process.

        Returns:
            The state of the openings. A problem is reported once; if the rank asks again, the host retries.
        """
        wanted = {opening.name: opening for opening in request.openings}
        with self._condition:
            self._wanted[request.client] = wanted
            self._close_unwanted()
            missing = []
            for name, opening in wanted.items():
                if name in self._running or name in self._opened:
                    continue
                if not self._has_source(opening.source):
                    missing.append(opening.source)
                elif not missing:  # in order, because a hook call changes what later openings see
                    self._running.add(name)
                    self._report_live()  # before the rank learns that the opening is ready, and sends requests
                    self._send(StartWorkers(opening))
            self._condition.wait_for(lambda: not self._running & wanted.keys(), timeout_s)
            outcomes = {name: self._opened[name] for name in wanted if name in self._opened}
            problems = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
            for name in problems:
                del self._opened[name], outcomes[name]
            lacking = ((name, outcomes[name]) for name in request.results if name in outcomes)
            results = {name: result for name, result in lacking if isinstance(result, CallResult)}
            return OpeningsReply(list(outcomes), sorted(set(missing)), problems, dict(islice(results.items(), 1)))

    def take(self, message: StartedWorkers) -> None:
        """Record the main process's answer for an opening."""
        with self._condition:
            self._running.discard(message.name)
            self._opened[message.name] = message.outcome
            self._condition.notify_all()
            self._report_live()
            self._close_unwanted()  # the rank may have exited in the meantime

    def keep(self, clients: Collection[str]) -> None:
        """Forget all ranks except ``clients``: the others have finished, or their leases have expired."""
        with self._condition:
            if gone := self._wanted.keys() - clients:
                for client in gone:
                    del self._wanted[client]
                self._close_unwanted()

    def _close_unwanted(self) -> None:
        wanted = set(chain.from_iterable(self._wanted.values()))
        # The main process would close the ones that it is opening now, too, although they may be wanted by then.
        unwanted = set() if self._running else self._opened.keys() - wanted
        for name in unwanted:
            del self._opened[name]
        if unwanted:
            self._send(KeepOpenings(sorted(wanted)))
            self._report_live()

    def _report_live(self) -> None:
        opened = {name for name, outcome in self._opened.items() if not isinstance(outcome, Failure)}
        self._set_live(self._running | opened)
