"""The random numbers of a training step: microbatches get those that the step draws for their rows of the batch.

The step draws for the whole batch, and then runs again for each microbatch. If it drew anew there, the loss would not
fit the network's inputs, which have the whole batch's numbers: a diffusion model would predict other noise.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sm.training.strategies.pipeline.random_state import random_state


class MatchedDraws(TorchDispatchMode):
    """Records the random numbers that torch draws in the block, from any generator, or replaces them by given ones.

    With it, a batch and its parts have the same random numbers: each part has those of its rows.

    Args:
        given: For a replay, the candidates to replace each draw; the first that has the shape of the draw does. There
            may be more draws, which are only recorded.

    Attributes:
        start: The default generators' states before the block; the result of ``random_state``.
        has_drawn: Whether the block has drawn any random numbers, also from Python's and NumPy's generators.
    """

    def __init__(self, given: Sequence[Sequence[Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self._drawn: list[Tensor] = []  # one tensor for each draw
        self._permutations: set[int] = set()  # numbers of draws
        self._fits = True  # whether every draw with candidates was replaced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one of torch's operations. Its tags tell whether it draws random numbers."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in filter(torch.is_tensor, (result,) if isinstance(result, Tensor) else result):
                number = len(self._drawn)
                if number < len(self._given):
                    fitting = [each for each in self._given[number] if each.shape == tensor.shape]
                    self._fits &= bool(fitting)
                    tensor.copy_((*fitting, tensor)[0])
                if func.overloadpacket is torch.ops.aten.randperm:
                    self._permutations.add(number)
                self._drawn.append(tensor.clone())
        return result

    def __enter__(self) -> MatchedDraws:
        """Begin the block."""
        self.start = random_state()
        return super().__enter__()  # type: ignore[no-untyped-call,no-any-return]

    def __exit__(self, *error: Any) -> None:
        """End the block."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._end = _other_states()
        self.has_drawn = bool(self._drawn) or random_state() != self.start

    def is_like(self, other: MatchedDraws) -> bool:
        """Return whether this block has drawn as often as another block, also from Python's and NumPy's generators."""
        return self._fits and len(self._drawn) == len(other._drawn) and _other_states() == other._end

    def of_rows(self, rows: slice, num_rows: int) -> list[list[Tensor]]:
        """Return candidates for the draws of a part of this block's batch: the same numbers, or those of its rows.

        Args:
            rows: The rows of the part.
            num_rows: Number of rows in the batch.
        """
        candidates = [[whole] for whole in self._drawn]
        for number, whole in enumerate(self._drawn):
            # A permutation's rows are indices into the batch, not into the part.
            if number not in self._permutations and whole.ndim and len(whole) % num_rows == 0:
                by_row = whole.reshape(num_rows, len(whole) // num_rows, *whole.shape[1:])
                candidates[number].append(by_row[rows].flatten(0, 1))
        return candidates

    @staticmethod
    def of_parts(parts: Sequence[MatchedDraws]) -> list[list[Tensor]]:
        """Return candidates for the draws of a batch: the same numbers as for each of its parts, or all of theirs."""
        candidates: list[list[Tensor]] = []
        for drawn in zip(*(part._drawn for part in parts), strict=False):
            candidates.append([drawn[0]] if all(map(drawn[0].equal, drawn)) else [])
            if drawn[0].ndim and len({each.shape[1:] for each in drawn}) == 1:
                candidates[-1].append(torch.cat(drawn))
        return candidates


def _other_states() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))
