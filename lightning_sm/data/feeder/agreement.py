"""Compares how data hosts describe the loaders that they opened. Pure rules over a given time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning_sm import errors
from lightning_sm.data.protocol.failures import with_place
from lightning_sm.errors import DataHostMismatchError, DataServiceError

# Hosts that open their loaders this much later than the first do not delay the start; they join later. Two hosts that
# differ are not reported before, either: the third may show which of them is the odd one.
_PATIENCE_S = 5.0


class LoaderAgreement:
    """Collects the replies of all hosts to each request for loaders, and passes on the one that they agree on.

    Args:
        num_hosts: Number of hosts.
        answer: Called once per request, with its name and the reply.
    """

    def __init__(self, num_hosts: int, answer: Callable[[str, dict[str, Any]], None]) -> None:
        self._num_hosts = num_hosts
        self._answer = answer
        self._replies: dict[str, dict[str, dict[str, Any]]] = {}
        self._first: dict[str, float] = {}
        self._answered: set[str] = set()
        self._present: set[str] = set()

    def request(self, name: str) -> None:
        """Pass on the agreed reply to a request again, if there is one."""
        if name in self._answered:
            self._answer(name, next(iter(self._replies[name].values())))

    def add_reply(self, name: str, host: str, reply: dict[str, Any], now: float) -> None:
        """Record a host's reply to a request.

        Raises:
            DataServiceError: The host failed to open the loaders, or the hosts disagree.
        """
        is_host_problem = reply.get("error") == "RemoteTransformError"  # the user's code failed: a full disk, perhaps
        if is_host_problem and name in self._answered:
            return  # the training continues without this host
        replies = self._replies.setdefault(name, {})
        replies[host] = reply
        if name not in self._answered:
            self._first.setdefault(name, now)
        if "error" in reply:
            error: type[DataServiceError] = getattr(errors, reply["error"])
            raise error(with_place(reply["text"], f"data host {host}, {reply['where']}"))
        if name in self._answered:
            _check_agreement(replies)
        else:
            self.tick(now)

    def tick(self, now: float) -> None:
        """Pass on the replies that need not wait any longer.

        Raises:
            DataHostMismatchError: The hosts disagree.
        """
        for name, first in list(self._first.items()):
            replies = self._replies[name]
            if any("error" in reply for reply in replies.values()):
                continue
            # Hosts that were missing for an earlier request do not delay later ones.
            if len(replies) >= (len(self._present) or self._num_hosts) or now - first >= _PATIENCE_S:
                self._answered.add(name)
                del self._first[name]
                self._present = set(replies)
                _check_agreement(replies)
                self._answer(name, next(iter(replies.values())))


def _check_agreement(replies: dict[str, dict[str, Any]]) -> None:
    # What setup() left on the DataModule may be a folder or a time of the host's own; the first host's is used.
    texts = {
        host: json.dumps({**reply, "attributes": None}, sort_keys=True)
        for host, reply in replies.items()
        if "error" not in reply
    }
    counts = Counter(texts.values()).most_common()
    if len(counts) <= 1:
        return
    odd = [host for host, text in texts.items() if text != counts[0][0]]
    # Without a majority, any of them may be the odd one.
    which = f" (different from most: {', '.join(odd)})" if 2 * len(odd) < len(texts) else ""
    described = "\n".join(f"  {host}: {_describe(reply)}" for host, reply in replies.items())
    raise DataHostMismatchError(
        f"Data hosts serve different data{which}:\n{described}\n"
        "All data hosts must see the same files and run the same versions. Check the channels of the data groups "
        "(S3DataDistributionType must be FullyReplicated) and the seeds in setup()."
    )


def _describe(reply: dict[str, Any]) -> str:
    loaders = [f"{it['name']}: {it['dataset']}, fingerprint {it['fingerprint']}" for it in reply.get("loaders", [])]
    return "; ".join(loaders) or json.dumps(reply)
