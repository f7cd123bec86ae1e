"""When the ranks keep a state in memory: as often as costs at most a share of the time. A pure rule without a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Of the time of the training, for all states.
MAX_SHARE = 0.01
# Steps before the ranks exchange for the first time what they have measured: the first ones compile.
_FIRST_STEPS = 4


@dataclass(frozen=True)
class StateCosts:
    """What one rank has measured since the training began.

    Attributes:
        elapsed_s: Seconds since then.
        spent_s: How many of them went into states.
        next_s: What the next state is expected to take.
        can_keep: Whether this rank keeps states, and has room for the next one.
        is_writing: Whether it still writes the last one.
        exchange_s: How long the last exchange of costs has taken. Most of it is no cost: the ranks would have waited
            for the last one in their next step.
    """

    elapsed_s: float
    spent_s: float
    next_s: float
    can_keep: bool
    is_writing: bool = False
    exchange_s: float = 0.0


class StateSchedule:
    """The steps at which the ranks of a fit keep a state.

    All ranks see the same steps, and are given the same costs of all of them, so all decide alike.

    Attributes:
        is_over: Whether no state will be kept any more, because no rank can.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._num_steps = 0
        self._next = _FIRST_STEPS

    def tick(self) -> bool:
        """Count a step; return whether the ranks must exchange their costs at its end."""
        self._num_steps += 1
        return not self.is_over and self._num_steps >= self._next

    def plan(self, of_ranks: Sequence[StateCosts]) -> bool:
        """Return whether the ranks keep a state now, and choose the step of the next exchange.

        Args:
            of_ranks: The costs of all ranks, in their order. The rank with the highest counts: the others wait for it.
        """
        self.is_over = not any(one.can_keep for one in of_ranks)
        is_due = not any(one.is_writing for one in of_ranks)
        is_due = is_due and all(steps_until_affordable(one, self._num_steps) == 0 for one in of_ranks)
        # The next one, after the state of now or the one that is being written.
        num_more = 2 if is_due or any(one.is_writing for one in of_ranks) else 1
        wait = max(steps_until_affordable(one, self._num_steps, num_more) for one in of_ranks)
        # Steps may become slower: do not wait for more of them than there have been.
        self._next = self._num_steps + min(max(1, wait), self._num_steps)
        return is_due and not self.is_over


def steps_until_affordable(costs: StateCosts, num_steps: int, num_states: int = 1) -> int:
    """Return in how many steps further states keep all of them within ``MAX_SHARE`` of the time; 0: now.

    Args:
        costs: The costs so far.
        num_steps: The steps so far.
        num_states: Number of further states.
    """
    missing_s = (costs.spent_s + num_states * costs.next_s) / MAX_SHARE - costs.elapsed_s
    if missing_s <= 0:
        return 0
    step_s = costs.elapsed_s / num_steps
    # An exchange costs time, too; without any measured time, the limit of ``plan`` holds.
    return math.ceil(missing_s / step_s) if step_s > 0 else num_steps
