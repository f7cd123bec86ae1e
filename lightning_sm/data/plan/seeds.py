"""The seed of every sample and batch: the same on every data host that computes it. Pure rules."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_sm.data.plan.splitmix import random_words
from lightning_sm.errors import DataSettingsError


def _to_integer(value: object) -> int:
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"it contains a {type(value).__name__}")


# Created once: json.dumps creates an encoder for every call that sets an option, which takes longer than the hash.
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_to_integer)


# A batch comes with the fields of its pass: hashing them for each batch would take 6 us.
@lru_cache(maxsize=16)
def _hash_of_pass(*fields: int | str) -> hashlib.blake2b:
    return hashlib.blake2b(encode_key(["lightning_sm.pass", *fields]), digest_size=8)


class SampleSeeds:
    """The seeds of one pass: those of its samples, its batches, its shards and its sampler.

    A sample's seed follows from its position in the order of the pass, not from its index: a sample that is drawn twice
    is augmented in two ways.

    Args:
        seed: Seed of the run.
        stage: What the pass is for, such as ``train``.
        loader_index: Position of the loader in its stage.
        epoch: Epoch of the trainer.
        pass_index: Counts passes over the same loader within one epoch.
    """

    def __init__(self, seed: int, stage: str, loader_index: int, epoch: int, pass_index: int) -> None:
        self._hash = _hash_of_pass(int(seed), stage, int(loader_index), int(epoch), int(pass_index))

    def of_samples(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """Return the seeds of some samples, unsigned 64-bit numbers: a hash for each would take 1.5 us.

        Args:
            positions: Their positions in the order of the pass.
        """
        own: list[int] = random_words(positions.astype(np.uint64), np.uint64(self.of("samples"))).tolist()
        return own

    def of(self, what: str, *numbers: int) -> int:
        """Return a seed, an unsigned 64-bit number.

        Args:
            what: What draws from it, a word such as ``batch``: what has another name has other seeds.
            numbers: Which one it is: the position of the batch, for example.
        """
        state = self._hash.copy()
        state.update(" ".join((what, *map(str, numbers))).encode())
        return int.from_bytes(state.digest(), "little")


def hook_seed(seed: int, hook: str, epoch: int) -> int:
    """Return the seed of one of the user's hooks, an unsigned 64-bit number.

    It is the same for all stages: a ``setup`` that splits the data must split it alike for ``fit`` and ``validate``.

    Args:
        seed: Seed of the run.
        hook: Name of the hook, such as ``setup``.
        epoch: Epoch of the trainer, for hooks that run again in later epochs; else 0.
    """
    key = encode_key(["lightning_sm.hook", int(seed), hook, int(epoch)])
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def worker_seed(seed: int, host: str, stage: str, loader_index: int, worker_id: int) -> int:
    """Return the seed of a worker as ``get_worker_info()`` shows it, an unsigned 63-bit number.

    It is the only seed that depends on the host: draws of a generator that a ``worker_init_fn`` makes from it must
    differ between workers, also those of different hosts.

    Args:
        seed: Seed of the run.
        host: Name of the data host.
        stage: What the loader is for, such as ``train``.
        loader_index: Position of the loader in its stage.
        worker_id: Number of the worker on its host.
    """
    key = encode_key(["lightning_sm.worker", int(seed), host, stage, int(loader_index), int(worker_id)])
    # torch.initial_seed() in a worker of DataLoader is never negative, nor above int64.
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def encode_key(value: object) -> bytes:
    """Encode a key so that different keys differ: JSON distinguishes 1 from "1", and marks where a sequence ends.

    Raises:
        DataSettingsError: JSON cannot express the key.
    """
    try:
        return _ENCODER.encode(value).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise DataSettingsError(
            f"The sample key {value!r} cannot be sent to a data host: {error}. Use integers, strings, or tuples and "
            "lists of them."
        ) from error
