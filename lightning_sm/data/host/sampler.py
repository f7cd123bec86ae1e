"""The orders of the user's samplers: new in each epoch, and the same on every data host."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from lightning_sm.data.host.generators import seed_all, seed_generator
from lightning_sm.data.ipc.processes import in_fork
from lightning_sm.data.plan.order import IndexArray
from lightning_sm.data.plan.seeds import SampleSeeds, encode_key
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# A pass without a limit may have this many samples, or this many times those of the dataset: more are taken for a
# sampler that never ends. As int64 they take 128 MiB.
_MAX_SAMPLES = 1 << 24
_MAX_REPEATS = 16

# Samples are turned into integers of 8 bytes in pieces of this size.
_CHUNK = 1 << 16

_FIRST_SAMPLE_TIMEOUT_S = 60.0

_END = object()  # no sampler yields it


class SamplerPass(NamedTuple):
    """One pass over a sampler.

    Attributes:
        epoch: Epoch of the training, for ``set_epoch``.
        seeds: The seeds of the pass.
    """

    epoch: int
    seeds: SampleSeeds


class OrderArrays(NamedTuple):
    """The order of a pass.

    Attributes:
        keys: What the dataset is indexed with, int64 of shape (samples,).
        offsets: For a batch sampler, the start of each batch, int64 of shape (batches + 1,), where the last item is the
            end of the last batch.
        is_cut: Whether the sampler has more.
        digest: Digest of the samples, if they are no integers; else empty.
    """

    keys: IndexArray
    offsets: IndexArray | None
    is_cut: bool
    digest: str = ""


class UserSampler:
    """A sampler or batch sampler of the user, with the samplers in its attributes.

    A local sampler goes on where its last pass ended. So does this one, in a process that runs the passes of all
    earlier epochs first, whatever was requested before: all hosts yield the same order. Before each pass, the global
    generators, and those in the sampler's attributes, are seeded for the pass.

    Args:
        sampler: The sampler; any iterable.
        name: Name of the loader, for messages.
        most: Samples (of a batch sampler: batches) of a pass that has no limit. Default: enough for any dataset.
    """

    def __init__(self, sampler: Any, name: str = "", most: int = _MAX_SAMPLES) -> None:
        self._sampler = sampler
        self._name = name
        self._most = most

    @property
    def parts(self) -> list[Any]:
        """The sampler, and those in its attributes."""
        return self._parts()[0]

    @property
    def is_stateless(self) -> bool:
        """Whether no pass changes the next one: so it is with torch's own samplers, but for their generators."""
        return all(map(is_of_torch, self.parts))

    def yields_indices(self, *, in_batches: bool) -> bool:
        """Draw the first sample in a fork, and return whether it is an integer, as then probably all are.

        Args:
            in_batches: Whether it is a batch sampler.
        """
        try:
            return bool(in_fork(lambda: self._starts_with_index(in_batches), _FIRST_SAMPLE_TIMEOUT_S))
        except TimeoutError as error:
            logger.warning("The sampler of %s has not yielded a sample: %s", self._name, error)
            return True
        except Exception:  # noqa: BLE001  # raised again when a pass runs the sampler, as with a local loader
            return True

    def advance(self, passes: Sequence[SamplerPass], stop: int = 0) -> None:
        """Run passes for the state in which they leave the sampler.

        Several passes, as after a restart, end with the first that leaves the sampler as it was: so do all others.

        Args:
            passes: The passes of consecutive epochs.
            stop: Items after which each ends; 0: where the sampler ends.

        Raises:
            DataSettingsError: The sampler does not end.
        """
        if self.is_stateless:
            return
        for number, past in enumerate(passes):
            before = self._state(past) if number + 1 < len(passes) else b""
            items = self.run(past)
            deque(islice(items, stop or self._most), maxlen=0)
            if not stop:
                self.check_end(items)
            if before and before == self._state(past):
                return

    def run(self, this: SamplerPass) -> Iterator[Any]:
        """Begin a pass, and return the iterator over its samples or batches."""
        self._begin(this)
        return iter(self._sampler)

    def arrays(self, this: SamplerPass, stop: int, *, in_batches: bool, has_keys: bool) -> OrderArrays:
        """Return the order of a pass. Call it in a fork: it changes the state of the sampler.

        Args:
            this: The pass.
            stop: Items after which it is cut; 0: where the sampler ends.
            in_batches: Whether the sampler yields batches.
            has_keys: Whether samples are integers; otherwise, their positions stand for them.

        Raises:
            DataSettingsError: The sampler does not end.
        """
        items = self.run(this)
        limit = min(stop or self._most, self._most)
        keys: list[IndexArray] = []
        sizes: list[IndexArray] = []
        others = hashlib.blake2b(digest_size=8)
        num_items = num_keys = 0
        while num_items < limit and num_keys <= self._most:
            chunk = list(islice(items, min(_CHUNK, limit - num_items)))
            if not chunk:
                break
            num_items += len(chunk)
            if in_batches:
                sizes.append(np.fromiter(map(len, chunk), np.int64, len(chunk)))
                chunk = list(chain.from_iterable(chunk))
            num_keys += len(chunk)
            if has_keys:
                keys.append(np.fromiter(chunk, np.int64, len(chunk)))
            else:
                with contextlib.suppress(DataSettingsError):  # keys that JSON cannot express
                    others.update(encode_key(chunk))
        is_cut = num_items == stop and next(items, _END) is not _END
        if num_items != stop and (num_items == limit or num_keys > self._most):
            self.check_end(items)
        none = [np.empty(0, np.int64)]
        return OrderArrays(
            np.concatenate(keys or none) if has_keys else np.arange(num_keys),
            np.concatenate([[0], np.cumsum(np.concatenate(sizes or none))]) if in_batches else None,
            is_cut,
            "" if has_keys else others.hexdigest(),
        )

    def order(self, this: SamplerPass, earlier: Sequence[SamplerPass]) -> list[Any]:
        """Return all samples or batches of a pass. Call it in a fork: it changes the state of the sampler.

        Args:
            this: The pass.
            earlier: The passes of the earlier epochs.
        """
        self.advance(earlier)
        items = self.run(this)
        order = list(islice(items, self._most))
        self.check_end(items)
        return order

    def check_end(self, items: Iterator[Any]) -> None:
        """Check that a pass of which as many items as possible were taken has no more.

        Raises:
            DataSettingsError: It has.
        """
        if next(items, _END) is not _END:
            raise DataSettingsError(
                f"The sampler of {self._name} has yielded {self._most} items in one pass, and has more. If it never "
                "ends, set limit_train_batches (limit_val_batches, ...) to the number of batches in an epoch, or "
                "max_steps; only the Trainer can then read the loader."
            )

    def _starts_with_index(self, in_batches: bool) -> bool:
        one_thread()
        samples = chain.from_iterable(self._sampler) if in_batches else self._sampler
        first: Any = next(iter(samples), 0)
        return isinstance(first, (int, np.integer)) or (isinstance(first, torch.Tensor) and first.ndim == 0)

    def _begin(self, this: SamplerPass) -> None:
        seed_all(this.seeds.of("sampler"))
        samplers, generators = self._parts()
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(this.epoch)
        # With equal seeds, generators would draw the same numbers.
        for number, generator in enumerate(generators):
            seed_generator(generator, this.seeds.of("sampler", number))

    def _state(self, this: SamplerPass) -> bytes:
        """Return a digest of the state at the beginning of a pass; empty: it cannot be pickled."""
        self._begin(this)
        try:
            return _digest(self._sampler, self._parts()[1])
        except Exception:  # noqa: BLE001  # __reduce__ of the user's classes may raise anything
            return b""

    def _parts(self) -> tuple[list[Any], list[Any]]:
        """Return the samplers in this one, itself first, and the random generators in all of them."""
        samplers: list[Any] = []
        generators: list[Any] = []
        seen: set[int] = set()

        def take(value: Any, *, is_sampler: bool = False) -> None:
            if id(value) in seen:
                return
            seen.add(id(value))
            if isinstance(value, _GENERATORS):
                generators.append(value)
            elif is_sampler or isinstance(value, Sampler):
                samplers.append(value)
                for name, attribute in list(getattr(value, "__dict__", {}).items()):
                    # A BatchSampler takes any iterable.
                    take(attribute, is_sampler=name in ("sampler", "batch_sampler"))
            elif isinstance(value, (list, tuple, dict)):
                items = value.values() if isinstance(value, dict) else value
                # Look only at the first item: it may be a list of a million indices.
                if isinstance(next(iter(items), None), (Sampler, *_GENERATORS)):
                    for item in items:
                        take(item)

        take(self._sampler, is_sampler=True)
        return samplers, generators


class _HashedFile:
    """A file of which only the hash is kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _StatePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    """Pickles a sampler without its data, which may be as large as memory, and without generators, which are seeded."""

    def __init__(self, file: _HashedFile, generators: list[Any]) -> None:
        super().__init__(file, 5, buffer_callback=lambda buffer: file.hash.update(buffer.raw()))
        self._generators = {id(generator) for generator in generators}

    def persistent_id(self, value: Any) -> Any:
        is_left_out = isinstance(value, Dataset) or id(value) in self._generators
        return (type(value).__name__, id(value)) if is_left_out else None


def most_samples(dataset_length: int | None, sampler_length: int | None) -> int:
    """Return how many samples or batches a pass without a limit may have, before its sampler counts as endless.

    Args:
        dataset_length: Length of the dataset, if it has one.
        sampler_length: Length of the sampler, if it has one.
    """
    return max(_MAX_SAMPLES, _MAX_REPEATS * (dataset_length or 0), sampler_length or 0)


def is_of_torch(sampler: Any) -> bool:
    """Return whether a sampler's class is torch's own. These keep no state but that of a generator."""
    return type(sampler).__module__.partition(".")[0] == "torch"


def one_thread() -> None:
    """Let torch use one thread. Call it first in each fork that runs code of the user.

    OpenMP's threads do not exist in a fork, and the next parallel operation would wait for them for ever.
    """
    torch.set_num_threads(1)


def _digest(sampler: Any, generators: list[Any]) -> bytes:
    file = _HashedFile()
    _StatePickler(file, generators).dump(sampler)
    return file.hash.digest()
