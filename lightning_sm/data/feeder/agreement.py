"""The agreement of data hosts on a reply: how long to wait for late hosts, and which hosts differ. Pure rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec.structs import asdict

from lightning_sm.data.protocol.calls import Loaders, Problem, SetUp
from lightning_sm.data.protocol.failures import USER_ERRORS
from lightning_sm.errors import DataHostMismatchError

# Training does not wait longer than this after the first reply; a host that replies later is compared then. Mismatches
# are not reported earlier, either: with more replies, a majority shows which host is the odd one.
PATIENCE_S = 5.0

_Reply = TypeVar("_Reply")


class Agreement(Generic[_Reply]):
    """The replies of data hosts to one request, all of which must be equal.

    Args:
        problem: First line of the error: what differs.
        fix: Last line of the error: what to do about it.
        compared_fields: Returns the fields of a reply that must be equal, as text by name. The error shows those that
            are not.
        patience_s: Seconds after the first reply from which the others are late.

    Attributes:
        replies: The replies by host, in the order of arrival.
        is_reached: Whether the hosts that replied in time were compared.
    """

    def __init__(
        self,
        problem: str,
        fix: str,
        compared_fields: Callable[[_Reply], dict[str, str]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.replies: dict[str, _Reply] = {}
        self.is_reached = False
        self._problem = problem
        self._fix = fix
        self._compared_fields = compared_fields
        self._patience_s = patience_s
        self._end_of_patience = math.inf

    @property
    def reply(self) -> _Reply:
        """The reply of the first host."""
        return next(iter(self.replies.values()))

    def add(self, host: str, reply: _Reply, now: float) -> None:
        """Record a host's reply.

        Raises:
            DataHostMismatchError: It is late, and differs from the others.
        """
        self.replies[host] = reply
        self._end_of_patience = min(self._end_of_patience, now + self._patience_s)
        if self.is_reached:
            self.check()

    def reach(self, num_hosts: int, now: float) -> bool:
        """Compare the replies once ``num_hosts`` hosts have replied, or the others are late; return whether they have.

        Raises:
            DataHostMismatchError: The replies differ.
        """
        if self.replies and (len(self.replies) >= num_hosts or now >= self._end_of_patience):
            self.is_reached = True
            self.check()
        return self.is_reached

    def check(self) -> None:
        """Compare the replies.

        Raises:
            DataHostMismatchError: They differ.
        """
        fields = {host: self._compared_fields(reply) for host, reply in self.replies.items()}
        equal = set.intersection(*(set(own.items()) for own in fields.values()))
        texts = {}
        for host, own in fields.items():
            different = [f"{name}: {value}" for name, value in own.items() if (name, value) not in equal]
            texts[host] = ", ".join(different)
        counts = Counter(texts.values()).most_common()
        if len(counts) <= 1:
            return
        odd = [host for host, text in texts.items() if text != counts[0][0]]
        # Without a majority, any of them may be the odd one.
        odd_hosts = f" (different from most: {', '.join(odd)})" if 2 * len(odd) < len(texts) else ""
        lines = [f"{self._problem}{odd_hosts}:", *(f"  {host}: {text}" for host, text in texts.items()), self._fix]
        raise DataHostMismatchError("\n".join(lines))


class LoaderAgreements:
    """The agreements of all hosts on each request for loaders.

    Args:
        num_hosts: Number of hosts.
        answer: Called once per request, with its name and the reply.
    """

    def __init__(self, num_hosts: int, answer: Callable[[str, SetUp | Loaders], None]) -> None:
        self._num_hosts = num_hosts
        self._answer = answer
        self._agreements: dict[str, Agreement[SetUp | Loaders]] = {}

    def request(self, name: str) -> None:
        """Pass on the agreed reply to a request again, if there is one."""
        if name in self._agreements and self._agreements[name].is_reached:
            self._answer(name, self._agreements[name].reply)

    def add_reply(self, name: str, host: str, reply: SetUp | Loaders | Problem, now: float) -> None:
        """Record a host's reply to a request.

        Raises:
            DataServiceError: The host failed to open the loaders, or the hosts disagree.
        """
        agreement = self._agreements.setdefault(name, _loader_agreement())
        if not isinstance(reply, Problem):
            agreement.add(host, reply, now)
            self.tick(now)
        # If the user's code failed on one host (a full disk, perhaps), a training that has begun continues without it.
        elif not (agreement.is_reached and reply.error in USER_ERRORS):
            raise reply.exception(host)

    def tick(self, now: float) -> None:
        """Pass on the replies that need not wait any longer.

        Raises:
            DataHostMismatchError: The hosts disagree.
        """
        for name, agreement in self._agreements.items():
            if not agreement.is_reached and agreement.reach(self._num_hosts, now):
                # Hosts that were late for one request must not delay the next ones.
                self._num_hosts = len(agreement.replies)
                self._answer(name, agreement.reply)


def _loader_agreement() -> Agreement[SetUp | Loaders]:
    return Agreement(
        "Data hosts serve different data",
        "All data hosts must see the same files and run the same versions. Check the channels of the data groups "
        "(S3DataDistributionType must be FullyReplicated) and the seeds in setup().",
        _loader_fields,
    )


def _loader_fields(reply: SetUp | Loaders) -> dict[str, str]:
    if isinstance(reply, SetUp):
        # Plain values from setup() may differ, such as a host's own folder or time: the first host's are used.
        return {"missing": str(reply.missing)}
    fields = {"structure": str(reply.structure)}
    for loader in reply.loaders:
        fields |= {f"{loader.name} {name}": str(value) for name, value in asdict(loader).items()}
    return fields
