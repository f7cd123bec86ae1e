"""SplitMix64, which turns numbers into others that look random: many at once, by NumPy."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

# The multipliers of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), and its
# increment, which is odd: a bijection of 64-bit numbers.
_INCREMENT, _FIRST, _SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_31, _30, _27 = map(np.uint64, (31, 30, 27))


def mixed(words: Words, key: np.uint64) -> Words:
    """Return numbers of which the high half looks random: another bijection of 64-bit numbers for each key."""
    mix = words * _INCREMENT + key
    mix = (mix ^ (mix >> _30)) * _FIRST
    return (mix ^ (mix >> _27)) * _SECOND


def random_words(words: Words, key: np.uint64) -> Words:
    """Return numbers of which all bits look random: the outputs of SplitMix64 with this seed at these positions."""
    mix = mixed(words, key)
    return mix ^ (mix >> _31)
