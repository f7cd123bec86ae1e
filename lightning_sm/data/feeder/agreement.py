"""What data hosts reply to the same request: how long late hosts are waited for, and which ones differ from the others.

Pure rules over a given time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_sm.data.protocol.calls import Loaders, Problem, SetUp
from lightning_sm.errors import DataHostMismatchError

# Hosts that reply this much later than the first do not delay the training; they are compared when they reply. Hosts
# that differ are not reported before, either: a late one may show which of them is the odd one.
PATIENCE_S = 5.0

_Reply = TypeVar("_Reply")


class Agreement(Generic[_Reply]):
    """The replies of data hosts to one request, all of which must be equal.

    Args:
        problem: What differs, if they are not: the error begins with it.
        fix: What to do about it: the error ends with it.
        fields: Returns what must be equal of a reply, by name; the error has what is not.
        patience_s: How many seconds after the first reply the others are late.

    Attributes:
        replies: The replies by host; the first came first.
        is_reached: Whether the hosts that replied in time have been compared.
    """

    def __init__(
        self, problem: str, fix: str, fields: Callable[[_Reply], dict[str, str]], patience_s: float = PATIENCE_S
    ) -> None:
        self.replies: dict[str, _Reply] = {}
        self.is_reached = False
        self._problem = problem
        self._fix = fix
        self._compared_fields = fields
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
        """Return whether so many hosts have replied, or the others are late.

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
        texts = {
            host: ", ".join(f"{name}: {value}" for name, value in own.items() if (name, value) not in equal)
            for host, own in fields.items()
        }
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
        # Where the user's code failed (a full disk, perhaps), a training that has begun continues without the host.
        elif not (agreement.is_reached and reply.error == "RemoteTransformError"):
            raise reply.exception(host)

    def tick(self, now: float) -> None:
        """Pass on the replies that need not wait any longer.

        Raises:
            DataHostMismatchError: The hosts disagree.
        """
        for name, agreement in self._agreements.items():
            if not agreement.is_reached and agreement.reach(self._num_hosts, now):
                # Hosts that were missing for an earlier request do not delay later ones.
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
        # What setup() left on the DataModule may be a folder or a time of the host's own; the first host's is used.
        return {"missing": str(reply.missing)}
    fields = {"structure": str(reply.structure)}
    for loader in reply.loaders:
        fields |= {f"{loader.name} {name}": str(value) for name, value in vars(loader).items()}
    return fields
