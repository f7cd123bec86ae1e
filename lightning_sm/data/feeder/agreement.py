"""What the data hosts say of the loaders that they opened, compared. Pure rules; time comes in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Hosts that open their loaders this much later than the first do not hold up the start; they join later. Before, hosts
# that disagree are not told from each other: the third may show which of two is the odd one.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Problem:
    """Why a host cannot be used.

    Attributes:
        error: Class of ``lightning_sm.errors`` by name.
        text: What happened.
    """

    error: str
    text: str


class Openings:
    """Collects the hosts' answers and passes on the one that they agree on.

    Args:
        num_hosts: Hosts that are asked.
        answer: Called once per opening with the name and the answer.
    """

    def __init__(self, num_hosts: int, answer: Callable[[str, dict[str, Any]], None]) -> None:
        self._num_hosts = num_hosts
        self._answer = answer
        self._replies: dict[str, dict[str, dict[str, Any]]] = {}
        self._first: dict[str, float] = {}
        self._answered: set[str] = set()
        self._present: set[str] = set()

    def ask(self, opening: str) -> None:
        """Note that an answer is wanted.

        Args:
            opening: Name of the opening.
        """
        if opening in self._answered:
            self._answer(opening, next(iter(self._replies[opening].values())))
        self._replies.setdefault(opening, {})

    def opened(self, opening: str, host: str, reply: dict[str, Any], now: float) -> Problem | None:
        """Take a host's answer.

        Args:
            opening: Name of the opening.
            host: Name of the host.
            reply: What it said.
            now: Time.

        Returns:
            What is wrong, if anything is.
        """
        replies = self._replies.setdefault(opening, {})
        is_of_the_host = reply.get("error") == "RemoteTransformError"  # a full disk, perhaps
        if is_of_the_host and opening in self._answered:
            return None  # it is left out, and the others go on
        replies[host] = reply
        self._first.setdefault(opening, now)
        if "error" in reply:
            return Problem(reply["error"], f"Data host {host} failed in {reply['where']}:\n{reply['text']}")
        return _disagreement(replies) if opening in self._answered else self.tick(now)

    def tick(self, now: float) -> Problem | None:
        """Answer what need not wait any longer.

        Args:
            now: Time.

        Returns:
            What is wrong, if anything is.
        """
        for opening, first in list(self._first.items()):
            replies = self._replies[opening]
            if opening in self._answered or any("error" in reply for reply in replies.values()):
                continue
            # Hosts that were not there for an earlier opening are not waited for again.
            if len(replies) >= (len(self._present) or self._num_hosts) or now - first >= _PATIENCE_S:
                self._answered.add(opening)
                self._present = set(replies)
                problem = _disagreement(replies)
                if problem is not None:
                    return problem
                self._answer(opening, next(iter(replies.values())))
        return None


def _disagreement(replies: dict[str, dict[str, Any]]) -> Problem | None:
    """Name the hosts that serve other data than most."""
    # What setup() leaves on the DataModule may be a folder or a time of the host's own; the first host's is used.
    facts = {host: {**reply, "attributes": None} for host, reply in replies.items() if "error" not in reply}
    texts = {host: json.dumps(reply, sort_keys=True) for host, reply in facts.items()}
    if len(set(texts.values())) <= 1:
        return None
    usual, _ = Counter(texts.values()).most_common(1)[0]
    odd = [host for host, text in texts.items() if text != usual]
    # Of two that differ, either may be the odd one.
    is_clear = 2 * len(odd) < len(texts)
    which = f", {', '.join(odd)} other than most" if is_clear else ""
    described = "\n".join(f"  {host}: {_describe(reply)}" for host, reply in replies.items())
    return Problem(
        "DataHostMismatchError",
        f"Data hosts serve different data{which}:\n{described}\n"
        "All data hosts must see the same files and run the same versions: look at the channels of the data groups "
        "(S3DataDistributionType must be FullyReplicated) and at seeds in setup().",
    )


def _describe(reply: dict[str, Any]) -> str:
    loaders = [
        f"{loader['name']}: {loader['dataset']}, fingerprint {loader['fingerprint']}"
        for loader in reply.get("loaders", [])
    ]
    return "; ".join(loaders) or json.dumps(reply)
