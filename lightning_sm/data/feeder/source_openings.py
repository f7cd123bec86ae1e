"""The sources that this rank wants open on data hosts."""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Callable, Mapping

from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.feeder.scheduler import Liveness
from lightning_sm.data.ipc.feeder_messages import SourceOpened
from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.protocol.failures import Failure, error_class, first_line
from lightning_sm.data.protocol.openings import CallResult, Opening
from lightning_sm.errors import DataHostMismatchError

# Once a host has been down for this long, move its stream workers to hosts that are up.
_LATE_S = 2.0

logger = logging.getLogger(__name__)


class SourceOpenings:
    """The open sources and their hosts. An indexed source is open on all hosts; each worker of a stream runs on one.

    Args:
        links: Links to the data hosts, by address. The feeder adds them when it starts.
        notify: Sends a message to the training process.
    """

    def __init__(self, links: Mapping[str, HostLink], notify: Callable[[Message], None]) -> None:
        self._links = links
        self._notify = notify
        self._wanted: dict[str, Opening] = {}
        self._snapshots: dict[str, mmap.mmap] = {}  # by opening
        self._stream_hosts: dict[str, str] = {}  # by opening
        self._down_since: dict[str, float] = {}
        self._failed: dict[str, set[str]] = {}  # by opening: the hosts that cannot open it
        # By hook call: the first host that ran the call, and the fields that all other hosts must match.
        self._results: dict[str, tuple[str, dict[str, str]]] = {}

    def open(self, opening: Opening, snapshot: mmap.mmap) -> None:
        """Open a source, given its memory, on its data hosts."""
        self._wanted[opening.name] = opening
        self._snapshots[opening.name] = snapshot
        for link in self._links_for(opening):
            link.want_source(opening)

    def close(self, name: str) -> None:
        """Close a source on all data hosts."""
        self._wanted.pop(name, None)
        self._snapshots.pop(name, None)
        self._stream_hosts.pop(name, None)
        self._failed.pop(name, None)
        self._results.pop(name, None)
        for link in self._links.values():
            link.release_source(name)

    def snapshot(self, digest: str) -> mmap.mmap | None:
        """Return the memory of a source, or None if no opening of it is wanted."""
        return next((self._snapshots[name] for name, one in self._wanted.items() if one.source == digest), None)

    def tick(self, now: float) -> None:
        """Move stream workers off hosts that have been down for too long.

        On their new hosts, which are up, the workers start over and skip ahead.

        Args:
            now: The current time on a monotonic clock.
        """
        links = self._links
        ready = [link for link in links.values() if link.state is Liveness.UP and not link.detail]
        self._down_since = {
            address: self._down_since.get(address, now)
            for address, link in links.items()
            if link.state is not Liveness.UP and address in self._stream_hosts.values()
        }
        late = [address for address, since in self._down_since.items() if now - since >= _LATE_S]
        for name, address in list(self._stream_hosts.items()):
            if address in late and ready:
                num_streams = Counter(self._stream_hosts.values())
                target = min(ready, key=lambda link: num_streams[link.address])
                links[address].release_source(name)
                self._stream_hosts[name] = target.address
                target.want_source(self._wanted[name])

    def is_wanted(self, name: str) -> bool:
        """Return whether an opening is still wanted."""
        return name in self._wanted

    def opened(self, link: HostLink, name: str, outcome: Failure | CallResult | None) -> None:
        """Tell the training process that a host has opened a source, or that no host can.

        Args:
            link: The host.
            name: Name of the opening.
            outcome: Why the host failed, or the result of a hook call.

        Raises:
            DataHostMismatchError: The result differs from another host's.
        """
        if name not in self._wanted:
            return
        failed = self._failed.setdefault(name, set())
        if isinstance(outcome, CallResult):
            self._compare(link, name, outcome.fields)
        if not isinstance(outcome, Failure):
            failed.discard(link.address)
            self._notify(SourceOpened(name, result=b"" if outcome is None else outcome.pickled))
            return
        failed.add(link.address)
        if len(failed) == len(self._links_for(self._wanted[name])):
            place = ", ".join(filter(None, (f"data host {link.name}", outcome.where)))
            self._notify(SourceOpened(name, error_class(outcome.error).__name__, outcome.at(place)))
        else:
            reason = first_line(outcome.text)
            logger.warning("Continuing without data host %s: %s failed: %s", link.name, outcome.where, reason)

    def _compare(self, link: HostLink, name: str, fields: dict[str, str]) -> None:
        first, expected = self._results.setdefault(name, (link.name, fields))
        if fields == expected:
            return
        lines = [
            f"  {field}: {expected.get(field, 'none')} on {first}, {fields.get(field, 'none')} on {link.name}"
            for field in sorted(fields.keys() | expected.keys())
            if fields.get(field) != expected.get(field)
        ]
        raise DataHostMismatchError(
            "\n".join(
                [
                    f"Data hosts {first} and {link.name} have different data or packages:",
                    *lines,
                    "All data hosts must see the same files, in the same order (sort what os.listdir() or glob() "
                    "returns), and run the same package versions. Check the channels of the data groups "
                    "(S3DataDistributionType must be FullyReplicated). If lists in a dataset may differ, give it a "
                    "fingerprint() method that returns what must not differ, as a string.",
                ]
            )
        )

    def _links_for(self, opening: Opening) -> list[HostLink]:
        """Return the links to the hosts that open a source: all hosts, or one."""
        links = self._links
        stream = opening.stream
        if stream is None:
            return list(links.values())[: 1 if opening.is_alone else None]
        if opening.name not in self._stream_hosts:
            num_streams = Counter(self._stream_hosts.values())
            # Start with a different host on each rank, so that streams spread over the hosts.
            first = stream.rank * stream.num_workers + stream.number
            addresses = list(links)
            rotated = [addresses[(first + number) % len(addresses)] for number in range(len(addresses))]
            self._stream_hosts[opening.name] = min(rotated, key=lambda address: num_streams[address])
        return [links[self._stream_hosts[opening.name]]]
