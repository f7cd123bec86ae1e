"""A process's RNG state, which is stored in checkpoints and passed to and from hooks on data hosts."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """The RNG states of this process, and those of CUDA and a generator if they are used.

    States are captured often and saved rarely, so they are converted only for saving. torch's states are kept as
    arrays, because pickling a tensor writes an in-memory file.
    """

    torch_state: np.ndarray[Any, Any]
    numpy_state: Any
    python_state: Any
    cuda_state: np.ndarray[Any, Any] | None
    generator_state: torch.Tensor | None

    @classmethod
    def now(cls, generator: torch.Generator | None = None) -> RandomState:
        """Return the current states."""
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.get_rng_state().numpy(),
            np.random.get_state(),  # the global state, from which user code draws
            random.getstate(),
            torch.cuda.get_rng_state().numpy() if has_cuda else None,
            None if generator is None else generator.get_state(),
        )

    def saved(self) -> dict[str, Any]:
        """Convert the states to values that ``torch.load(weights_only=True)`` accepts."""
        name, keys, *rest = self.numpy_state
        version, numbers, gauss = self.python_state
        return {
            "torch": torch.tensor(self.torch_state),
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
            "python": [version, torch.tensor(numbers), gauss],
            "cuda": None if self.cuda_state is None else torch.tensor(self.cuda_state),
            "generator": self.generator_state,
        }

    @classmethod
    def of(cls, saved: dict[str, Any]) -> RandomState:
        """Rebuild the states from the result of ``saved``."""
        name, keys, *rest = saved["numpy"]
        version, numbers, gauss = saved["python"]
        return cls(
            saved["torch"].cpu().numpy(),
            (name, keys.cpu().numpy().astype(np.uint32), *rest),
            (version, tuple(numbers.tolist()), gauss),
            None if saved["cuda"] is None else saved["cuda"].cpu().numpy(),
            None if saved["generator"] is None else saved["generator"].cpu(),
        )

    def is_same(self, other: RandomState) -> bool:
        """Return whether another state yields the same random numbers on the CPU."""
        mine, others = (pickle.dumps((each.torch_state, each.numpy_state, each.python_state)) for each in (self, other))
        return mine == others

    def restore(self, generator: torch.Generator | None = None) -> None:
        """Restore these states in this process and in a generator."""
        torch.set_rng_state(torch.tensor(self.torch_state, device="cpu"))
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        if self.cuda_state is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(self.cuda_state, device="cpu"))
        if self.generator_state is not None and generator is not None:
            generator.set_state(self.generator_state)
