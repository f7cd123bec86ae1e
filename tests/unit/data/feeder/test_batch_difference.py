"""Two builds of a batch are equal, or the part that differs is found and named."""

import copy
import random
import warnings
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.encode import encode
from lightning_sm.data.batch.format import DTYPES
from lightning_sm.data.feeder.batch_difference import BatchBuild, _tensor_item_bytes, difference
from lightning_sm.errors import WireError
from tests.fakes.batches import (
    ARRAYS,
    CONTAINERS,
    SCALARS,
    Box,
    Colour,
    Point,
    every_dtype,
    make_slot,
    quietly,
    sparse_and_nested,
)

NUM_SAMPLES = 4


def build(batch, garbage=0):
    """Return a batch as a worker builds it, in a slot that held something else before."""
    slot = make_slot()
    slot[:] = garbage
    arena = Arena(slot)
    structure = encode(batch, arena)
    return BatchBuild(structure, np.frombuffer(arena._memory, np.uint8)[: arena.used].copy())


def compare(first, second, num_samples=NUM_SAMPLES):
    """Return the difference between two batches."""
    return difference(build(first), build(second, garbage=255), num_samples)


def every_kind():
    """Return batches of every kind that can be sent."""
    return [
        *SCALARS,
        *CONTAINERS,
        *ARRAYS,
        *(tensor for _, tensor in every_dtype()),
        *quietly(sparse_and_nested).values(),
        pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False),
        {"image": torch.arange(24.0).view(2, 3, 4).permute(0, 2, 1), "twice": [b"x" * 300] * 2},
        [torch.nn.Parameter(torch.ones(2)), torch.empty(0, 4), {b"k" * 200, 1}],
    ]


@pytest.mark.parametrize("number", range(len(every_kind())))
def test_equal_batches_do_not_differ(number):
    """Two builds of the same batch are equal, whatever its kind, and whatever lay in the slots before."""
    batch = every_kind()[number]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compare(batch, batch) is None
        assert compare([0, batch, batch], [0, batch, batch]) is None
        found = compare([0, batch], [1, batch])
    assert (found.path, found.texts, found.is_inexact) == ("batch[0]", ("0", "1"), False)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_torch_has_a_size(name):
    """The bytes of an element follow from the dtype's name, as torch has them."""
    assert _tensor_item_bytes(name) == DTYPES[name].itemsize


@pytest.mark.parametrize("name", [name for name, _ in every_dtype()])
def test_a_bit_of_any_tensor_is_found(name):
    """One different bit in an element is found, and counts as inexact only for floating-point and complex numbers."""
    tensor = dict(every_dtype())[name]
    raw = tensor.view(torch.uint8).clone()
    other = raw.view(tensor.dtype)
    raw[1, 2 * tensor.element_size()] ^= 1
    found = compare({"x": tensor}, {"x": other}, num_samples=3)
    is_inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    assert (found.path, found.is_inexact, found.rows) == ('batch["x"][1, 2]', is_inexact, (1,))
    assert found.texts[0] != found.texts[1]
    assert (found.num_different, found.num_elements) == (1, 12)


FIRST = torch.arange(4)


def marked(mark):
    """A tensor with an attribute."""
    tensor = torch.arange(3)
    tensor.mark = mark
    return tensor


DIFFERENT = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "large int": (2**80, 2**80 + 1),
    "str": ("a", "b"),
    "str and bytes": ("a", b"a"),
    "surrogate": ("\ud800", "\ud801"),
    "short bytes": (b"a", b"b"),
    "long bytes": (b"a" * 300, b"a" * 299 + b"b"),
    "None": (None, 0),
    "length": ([1, 2], [1, 2, 3]),
    "list and tuple": ([1], (1,)),
    "keys": ({"a": 1}, {"b": 1}),
    "ordered dict": ({"a": 1}, OrderedDict({"a": 1})),
    "types of keys": ({1: 0}, {True: 0}),
    "keys of tuples": ({(1, "a"): 0}, {(1.0, "a"): 0}),
    "NumPy keys": ({np.int64(1): 0}, {np.int64(2): 0}),
    "types in a set": ({1}, {True}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "set": ({1, 2}, {1, 3}),
    "enum": (Colour.RED, "RED"),
    "class": (Point(1, 2), Box(1, 2)),
    "field": (Point(1, 2), Point(1, 3)),
    "size": (torch.Size([2]), torch.Size([3])),
    "range": (range(3), range(4)),
    "slice": (slice(1), slice(2)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "requires_grad": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "int array": (np.arange(3), np.array([0, 1, 3])),
    "str array": (np.array(["a", "b"]), np.array(["a", "c"])),
    "date": (np.array(["2024-01-01"], "M8[D]"), np.array(["2024-01-02"], "M8[D]")),
    "numpy scalar": (np.int8(3), np.int8(4)),
    "empty numpy scalar": (np.str_(""), np.str_("a")),
    "record": (np.array([(1, 1.0)], "i4,f4"), np.array([(2, 1.0)], "i4,f4")),
    "deque": (deque([1, 2]), deque([1, 3])),
    "length of a deque": (deque([1], 2), deque([1], 3)),
    "defaultdict": (defaultdict(list, {"a": 1}), defaultdict(list, {"a": 2})),
    "default factory": (defaultdict(list), defaultdict(set)),
    "bytearray": (bytearray(300), bytearray(299) + b"b"),
    "attribute after a reference": ([marked(1), {"x": FIRST}, FIRST, 1], [marked(1), {"x": FIRST}, FIRST, 2]),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse()),
}
INEXACT = {
    "attribute of a tensor": (marked(1), marked(2)),
    "float": (0.1, 0.2),
    "zero": (0.0, -0.0),
    "infinity": (1.0, float("inf")),
    "complex": (1 + 2j, 1 + 3j),
    "tensor": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
    "array": (np.array([1.0]), np.array([1.5])),
    "longdouble": (np.array([1], np.longdouble), np.array([2], np.longdouble)),
    "scalar": (np.float32(1), np.float32(2)),
    "complex array": (np.array([1j], np.clongdouble), np.array([2j], np.clongdouble)),
    "record": (np.array([(1, 1.0)], "i4,f4"), np.array([(1, 2.0)], "i4,f4")),
    "NaN": (np.array([0x7FC00000], "u4").view("f4"), np.array([0x7FC00001], "u4").view("f4")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_must_be_equal(name):
    """A difference of types, shapes, structure, integers, text or bytes is exact, and both texts say what is there."""
    found = compare(*DIFFERENT[name])
    assert not found.is_inexact
    assert found.texts[0] != found.texts[1]


@pytest.mark.parametrize("name", INEXACT)
def test_what_may_be_inexact(name):
    """A difference of floating-point or complex numbers is inexact; their bits are shown if the texts are equal."""
    found = compare(*INEXACT[name])
    assert found.is_inexact
    assert found.texts[0] != found.texts[1]


def test_equal_bits_of_nan_are_equal():
    """NaN equals NaN."""
    nan = float("nan")
    assert compare([nan, torch.tensor([nan]), np.array([nan])], [nan, torch.tensor([nan]), np.array([nan])]) is None


def test_an_exact_difference_comes_before_inexact_ones():
    """The difference that ends a training is named, even if others come before it."""
    found = compare({"x": torch.zeros(4), "y": 1}, {"x": torch.ones(4), "y": 2})
    assert (found.path, found.is_inexact) == ('batch["y"]', False)


def test_shared_memory_is_no_part_of_a_batch():
    """Whether two tensors share memory, and whether two leaves are the same object, makes no difference."""
    base = torch.arange(8)
    assert compare([base[:4], base[2:6]], [base[:4].clone(), base[2:6].clone()]) is None
    text = b"x" * 200
    assert compare([text, text, base, base], [text, bytes(bytearray(text)), base, base.clone()]) is None


def test_samples_are_known_by_their_row():
    """The rows that differ are found in arrays and lists with an item for each sample, and in lists of samples."""
    first = torch.arange(8).view(4, 2)
    second = first.clone()
    second[1, 1] = second[3, 0] = 9
    assert compare({"a": [first]}, {"a": [second]}).rows == (1, 3)
    assert compare({"name": ["a", "b", "c", "d"]}, {"name": ["a", "b", "c", "x"]}).rows == (3,)
    samples = [[torch.zeros(7, dtype=torch.int8), "a"] for _ in range(4)]
    others = copy.deepcopy(samples)
    others[2][0][5] = 1
    assert compare(samples, others).rows == (2,)
    assert compare(torch.zeros(3, dtype=torch.int8), torch.ones(3, dtype=torch.int8)).rows == ()


LEAVES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=200),
    st.booleans(),
    st.lists(st.integers(0, 255), min_size=1, max_size=9).map(lambda items: torch.tensor(items, dtype=torch.uint8)),
    st.lists(st.floats(width=32), min_size=1, max_size=9).map(lambda items: np.array(items, np.float32)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4),
        st.lists(inner, min_size=1, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=4),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.tuples(inner, inner).map(Box),
    ),
    max_leaves=12,
)


def changed(leaf, rng):
    """Return a leaf of the same type and shape with another value."""
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, torch.Tensor | np.ndarray):
        other = leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
        raw = other.view(torch.uint8 if isinstance(leaf, torch.Tensor) else np.uint8)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        return other
    if isinstance(leaf, int):
        return leaf + rng.choice([-1, 1, 2**64])
    if isinstance(leaf, float):
        return 1.25 if leaf != 1.25 else -1.25
    return leaf + leaf[:0] + ("x" if isinstance(leaf, str) else b"x")


def take_apart(batch):
    """Return the children of a container, and what makes one of them again; None for a leaf."""
    if isinstance(batch, Box):
        return [batch.corners], lambda items: Box(*items)
    if isinstance(batch, Point):
        return list(batch), lambda items: Point(*items)
    if isinstance(batch, dict):
        return list(batch.values()), lambda items: dict(zip(batch, items, strict=True))
    return (batch, type(batch)) if isinstance(batch, list | tuple) else None


def leaves_of(batch):
    """Return all leaves of a batch."""
    parts = take_apart(batch)
    return [batch] if parts is None else [leaf for child in parts[0] for leaf in leaves_of(child)]


def with_leaves(batch, leaves):
    """Return a copy of a batch with other leaves, from an iterator."""
    parts = take_apart(batch)
    return next(leaves) if parts is None else parts[1]([with_leaves(child, leaves) for child in parts[0]])


@given(batch=TREES, seed=st.integers(0, 2**32))
def test_any_changed_leaf_is_found(batch, seed):
    """Of any batch, a copy is equal, and any one changed leaf is found, as exact or inexact as its type is."""
    rng = random.Random(seed)
    assert compare(batch, copy.deepcopy(batch)) is None
    leaves = leaves_of(batch)
    target = rng.randrange(len(leaves))
    others = [*leaves[:target], changed(leaves[target], rng), *leaves[target + 1 :]]
    found = compare(batch, with_leaves(batch, iter(others)))
    assert found.is_inexact == (isinstance(leaves[target], float | np.ndarray))
    assert found.texts[0] != found.texts[1]


@pytest.mark.parametrize(
    "structure", [b"", b"[]", b"nonsense", b'["lsm-batch",1,8,["t",0,"int64",[99],null,0]]', b"[" * 9999]
)
def test_malformed_builds_are_an_error_of_the_protocol(structure):
    """A build that cannot be read is an error that says so, and no other one."""
    good = build(torch.zeros(4))
    with pytest.raises(WireError, match="a batch is malformed"):
        difference(good, BatchBuild(structure, np.zeros(8, np.uint8)), 4)
