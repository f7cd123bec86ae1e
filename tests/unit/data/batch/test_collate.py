"""Collating into a slot gives the result of torch's default_collate without allocating memory."""

from __future__ import annotations

import mmap
import resource
from collections import OrderedDict, namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.collate import collate_into
from lightning_sm.data.batch.serialization import pickle_batch, unpickle_batch
from lightning_sm.errors import BatchTooLargeError

Pair = namedtuple("Pair", "left right")


def make_arena(nbytes=1 << 20):
    """Return an arena over private memory."""
    return Arena(np.zeros(nbytes, np.uint8))


def outcome(function, samples):
    """Return what a collate function returns, or the error that it raises."""
    try:
        return function(samples)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        return type(error), str(error)


def assert_same(received, expected):
    """Compare two batches: types, order, dtypes, shapes, strides and bytes."""
    assert type(received) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert received.dtype == expected.dtype
        assert received.shape == expected.shape
        assert received.stride() == expected.stride()
        assert torch.equal(received, expected)
    elif isinstance(expected, dict):
        assert list(received) == list(expected)
        for key, value in expected.items():
            assert_same(received[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(received) == len(expected)
        for pair in zip(received, expected, strict=True):
            assert_same(*pair)
    else:
        assert received == expected


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex64]
ARRAY_DTYPES = ["f4", "f8", "i2", "u1", "?", "c8"]


def tensors(shape, dtype):
    """Return a maker of random tensors of one shape and dtype."""
    return lambda rng: torch.from_numpy(rng.integers(0, 2, shape)).to(dtype)


def arrays(shape, dtype):
    """Return a maker of random arrays of one shape and dtype."""
    return lambda rng: rng.integers(0, 100, shape).astype(dtype)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.one_of(
    st.builds(tensors, shapes, st.sampled_from(DTYPES)),
    st.builds(arrays, shapes, st.sampled_from(ARRAY_DTYPES)),
    st.sampled_from(
        [
            lambda rng: int(rng.integers(100)),
            lambda rng: float(rng.random()),
            lambda rng: bool(rng.integers(2)),
            lambda rng: str(rng.integers(100)),
            lambda rng: bytes(3),
            lambda rng: np.float32(rng.random()),
            lambda rng: rng.integers(100),
            lambda rng: None,
            lambda rng: np.array(["text"]),
            lambda rng: torch.ones(int(rng.integers(1, 3))),
            lambda rng: [1] * int(rng.integers(1, 3)),
        ]
    ),
)


def containers(makers):
    """Return a strategy for makers of containers, which the given makers fill."""
    lists = st.lists(makers, min_size=1, max_size=3)
    return st.one_of(
        lists.map(lambda items: lambda rng: [make(rng) for make in items]),
        lists.map(lambda items: lambda rng: tuple(make(rng) for make in items)),
        lists.map(lambda items: lambda rng: {f"k{number}": make(rng) for number, make in enumerate(items)}),
        lists.map(lambda items: lambda rng: OrderedDict((number, make(rng)) for number, make in enumerate(items))),
        st.tuples(makers, makers).map(lambda items: lambda rng: Pair(*(make(rng) for make in items))),
    )


@settings(max_examples=200)
@given(st.recursive(leaves, containers, max_leaves=6), st.integers(1, 5), st.integers(0, 2**32))
def test_result_equals_that_of_torch(make, num_samples, seed):
    """For nested samples of any kind, the result or error equals default_collate's, before and after sending."""
    rng = np.random.default_rng(seed)
    samples = [make(rng) for _ in range(num_samples)]
    expected = outcome(default_collate, samples)
    arena = make_arena()
    received = outcome(lambda samples: collate_into(default_collate, samples, arena), samples)
    assert_same(received, expected)
    if not isinstance(expected, tuple):
        structure = pickle_batch(received, arena)
        assert_same(unpickle_batch(structure, np.frombuffer(arena._memory, np.uint8)), expected)


def odd_samples():
    """Return samples that cannot simply be stacked into given memory."""
    value = torch.tensor([1 + 2j])
    return {
        "gradients": [torch.ones(2, requires_grad=True)] * 2,
        "gradients later": [torch.ones(2), torch.ones(2, requires_grad=True)],
        "conjugated": [value.conj(), value],
        "negated": [value.conj().imag, torch.ones(1)],
        "mixed dtypes": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
        "mixed shapes": [torch.ones(2), torch.ones(3)],
        "empty": [torch.empty(0, 3)] * 2,
        "sparse": [torch.eye(2).to_sparse()] * 2,
        "parameters": [torch.nn.Parameter(torch.ones(2))] * 2,
        "tensor and number": [torch.ones(2), 1],
        "channels last": [torch.rand(4, 5, 3).permute(2, 0, 1) for _ in range(2)],
        "expanded": [torch.ones(1).expand(4)] * 2,
        "object array": [np.array([None])] * 2,
    }


@pytest.mark.parametrize("name", odd_samples())
def test_samples_that_cannot_be_stacked_in_place(name):
    """Samples that cannot be stacked into given memory give default_collate's result, graph or error."""
    samples = odd_samples()[name]
    arena = make_arena()
    received = outcome(partial(collate_into, default_collate, arena=arena), samples)
    expected = outcome(default_collate, samples)
    if not isinstance(expected, torch.Tensor) or expected.requires_grad:
        assert arena.used == 0
    if not isinstance(expected, torch.Tensor):
        assert received == expected
        return
    assert received.requires_grad == expected.requires_grad
    assert (received.grad_fn is None) == (expected.grad_fn is None)
    assert_same(received.detach(), expected.detach())


def test_result_is_contiguous_as_in_a_worker():
    """The result is contiguous, as in a DataLoader's worker, even if stack() would keep channels-last strides."""
    samples = [torch.rand(2, 4, 5, 3).permute(0, 3, 1, 2) for _ in range(2)]
    received, expected = collate_into(default_collate, samples, make_arena()), default_collate(samples)
    assert received.is_contiguous()
    assert torch.equal(received, expected)


def test_tensors_lie_in_the_arena():
    """Stacked tensors and arrays lie in the arena, so pickling copies only the small rest."""
    arena = make_arena()
    batch = collate_into(default_collate, [(torch.ones(10, 10), np.ones(5), 3)] * 8, arena)
    used = arena.used
    assert used >= 8 * (400 + 40)
    assert arena.offset_of(batch[0].data_ptr(), batch[0].nbytes) == 0
    pickle_batch(batch, arena)
    assert arena.used <= used + 1024


def test_user_function_runs_as_it_is():
    """A user's collate function gets the samples, and its result is returned unchanged."""
    arena = make_arena()
    samples = [torch.ones(3)]
    assert collate_into(lambda given: given, samples, arena) is samples
    assert arena.used == 0


def test_changes_of_torchs_map_are_respected(monkeypatch):
    """Types that the user added to torch's map, and a replaced entry for tensors, are used."""
    monkeypatch.setitem(torch_collate.default_collate_fn_map, complex, lambda batch, **_: sum(batch))
    assert collate_into(default_collate, [1j, 2j], make_arena()) == 3j
    monkeypatch.setitem(torch_collate.default_collate_fn_map, torch.Tensor, lambda batch, **_: "mine")
    assert collate_into(default_collate, [torch.ones(1)], make_arena()) == "mine"


def test_batch_larger_than_the_arena_is_an_error():
    """A batch that does not fit is refused while it is built."""
    with pytest.raises(BatchTooLargeError, match="max_batch_bytes"):
        collate_into(default_collate, [torch.ones(1000)] * 2, make_arena(1024))


def count_page_faults(collate, samples):
    """Return the number of page faults for one batch."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    collate(samples)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_stacking_into_the_arena_takes_no_fresh_memory():
    """After the first batch, stacking 16 MB into the arena faults in almost no pages; fresh memory needs thousands."""
    samples = [torch.full((512, 512), float(number)) for number in range(16)]
    arena = make_arena(17 << 20)
    collate = partial(collate_into, default_collate, arena=arena)

    def once_more(samples):
        arena.used = 0
        collate(samples)

    once_more(samples)
    assert min(count_page_faults(once_more, samples) for _ in range(3)) < 50
    # Compare with fresh memory: default_collate may reuse memory that this process has freed before.
    with mmap.mmap(-1, 16 << 20) as fresh:
        fresh.madvise(mmap.MADV_NOHUGEPAGE)
        assert count_page_faults(fresh.write, bytes(16 << 20)) > 1000
