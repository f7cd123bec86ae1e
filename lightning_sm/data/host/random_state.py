"""The three global random generators that transforms use: ``random``, NumPy's and torch's."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch

_WORDS = 624  # of a Mersenne Twister's state


def _python_trace(generator: Any) -> Callable[[], tuple[int, int]]:
    """Return a function that reads the position and two words of a generator directly from memory."""
    # Modules/_randommodule.c: int index; uint32_t state[624]. The first word is the same for all seeds.
    address = id(generator) + object.__basicsize__
    index, words = ctypes.c_uint32.from_address(address), ctypes.c_uint64.from_address(address + 8)
    return lambda: (index.value, words.value)


def _numpy_trace(bits: Any) -> Callable[[], tuple[int, int]]:
    """Return a function that reads the position and a word of a generator directly from memory."""
    # numpy/random/src/mt19937/mt19937.h: uint32_t key[624]; int pos.
    address = bits.ctypes.state_address + 4 * (_WORDS - 1)
    word, position = ctypes.c_uint32.from_address(address), ctypes.c_uint32.from_address(address + 4)
    return lambda: (position.value, word.value)


def _traces_are_known() -> bool:
    """Return whether this interpreter and this NumPy lay out their generators as expected."""
    python, bits = random.Random(1), np.random.MT19937(1)  # noqa: S311  # not for secrets
    python.random()
    bits.random_raw()
    words, state = python.getstate()[1], bits.state["state"]
    return _python_trace(python)() == (words[_WORDS], words[1] | words[2] << 32) and _numpy_trace(bits)() == (
        state["pos"],
        state["key"][-1],
    )


# The objects behind the functions of the modules.
_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
_numpy_bits: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]  # missing in NumPy's types
_BITS = _numpy_bits()
_python_words, _numpy_words = _python_trace(_PYTHON), _numpy_trace(_BITS)
_TRACES_ARE_KNOWN = _traces_are_known()


class Generator:
    """One of the three generators.

    Args:
        seed: Seeds it with 64 bits.
        get: Returns its state.
        set_: Restores a state.
        trace: Returns quickly what differs after any draw from a seeded generator: ``get`` takes up to 35 us.
    """

    def __init__(
        self,
        seed: Callable[[int], object],
        get: Callable[[], Any],
        set_: Callable[[Any], object],
        trace: Callable[[], object],
    ) -> None:
        self._seed = seed
        self.get = get
        self._set = set_
        # A new object differs from all others: where traces are unknown, every generator counts as used.
        self._trace = trace if _TRACES_ARE_KNOWN else object
        self._mark: object = None
        self._started: int | None = None
        self.was_read = False

    def seed(self, seed: int) -> None:
        """Seed it with 64 bits."""
        self._started = None
        self._seed(seed)

    def set(self, state: Any) -> None:
        """Restore a state."""
        self._started = None
        self._set(state)

    def start(self, seed: int) -> None:
        """Seed it, unless it has this seed and was not used since, and begin to watch whether it is used."""
        if self._started != seed or self.was_used:
            self.seed(seed)
            self.mark()
            self._started = seed

    def mark(self) -> None:
        """Begin to watch whether it is used. Seed it before: see ``clear``."""
        self.was_read = False
        self._mark = self._trace()

    def clear(self) -> None:
        """Begin to watch whether it is used, in any state of which draws leave a trace."""
        if self.was_used:
            # Normal numbers are drawn in pairs: the second one, if it is left over, would be taken without a trace.
            self.start(0)

    @property
    def was_used(self) -> bool:
        """Whether, since ``mark``, numbers were drawn, or the state was read or replaced."""
        return self.was_read or self._trace() != self._mark


PYTHON = Generator(random.seed, random.getstate, random.setstate, lambda: (_python_words(), _PYTHON.gauss_next))
NUMPY = Generator(
    # The legacy generator behind np.random.seed takes 32 bits.
    lambda seed: np.random.seed(seed & 0xFFFFFFFF),
    np.random.get_state,
    np.random.set_state,
    lambda: (_numpy_words(), _numpy_bits()),
)
TORCH = Generator(
    # torch.manual_seed() also seeds every accelerator, and takes 100 us; this takes 1 us.
    torch.default_generator.manual_seed,
    torch.default_generator.get_state,
    torch.default_generator.set_state,
    lambda: torch.default_generator.get_state().numpy().tobytes(),
)
GENERATORS = (PYTHON, NUMPY, TORCH)


def seed_all(seed: int) -> None:
    """Seed all three.

    Args:
        seed: 64 bits.
    """
    for generator in GENERATORS:
        generator.seed(seed)


class RandomStates:
    """The states of all three for one of several streams of samples that take turns in a process.

    Args:
        seed: Initial seed, 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # Only of generators that the stream has used: the others are seeded each time, which is faster than saving.
        self._states: dict[Generator, Any] = {}

    def __enter__(self) -> None:
        """Restore the states at which this stream stopped."""
        for generator in GENERATORS:
            if generator in self._states:
                generator.set(self._states[generator])
            else:
                generator.start(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remember the states at which this stream stopped; count draws from now on as use by others."""
        for generator in GENERATORS:
            if generator in self._states or generator.was_used:
                self._states[generator] = generator.get()
                generator.clear()
