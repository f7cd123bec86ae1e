"""Broken and malicious messages end in an error that says so, never in another one, a crash, or a lot of memory.

``LIGHTNING_SM_FUZZ_MUTATIONS`` sets how many messages are tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tracemalloc
import warnings
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.batch.encode import encode
from lightning_sm.errors import BatchTypeError, WireError
from tests.fakes.batches import (
    ARRAYS,
    CONTAINERS,
    SCALARS,
    Box,
    Colour,
    Items,
    Point,
    Record,
    Volume,
    every_dtype,
    quietly,
    sparse_and_nested,
)

NUM_MUTATIONS = int(os.environ.get("LIGHTNING_SM_FUZZ_MUTATIONS", "30000"))
SEED = int(os.environ.get("LIGHTNING_SM_FUZZ_SEED", "0"))

# A byte of JSON becomes at most a list in a list, and that a container: "[],", 3 bytes, is 64 bytes when parsed.
MEMORY_PER_BYTE = 100
# What one decoding takes whatever the message is: an error with its traceback, and the cache of headers.
MEMORY_PER_MESSAGE = 100_000

NUMBERS = [0, -1, 1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 65, 128, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63]
VALUES = [*NUMBERS, 10**12, 10**30, -(2**63), 1.5, -0.0, 1e308, True, False, None, "", "l", "\ud800", [], {}, ["r", 0]]
NAMES = [
    *("t", "a", "n", "l", "u", "d", "o", "set", "size", "range", "slice", "B", "b", "r", "x", "e", "p", "i", "f", "c"),
    *("A", "deque", "default", "__class__", "__dict__", "_values", "layout", "collections:Counter", "torch:Tensor"),
    *("torch.nn.parameter:Parameter", "datetime:datetime", "decimal:Decimal", "builtins:bool", "builtins:dict"),
    *("float32", "int64", "int32", "bool", "uint8", "complex128", "complex32", "float8_e4m3fn", "int4", "qint8"),
    *("<f8", "<i8", "|b1", "<U3", "<U0", "|S4", "|O8", "<M8[ns]", "<M8[0ns]", "|V3", "<c16", "<f16", "i4,f4"),
    *("torch.sparse_coo", "torch.sparse_csr", "torch.sparse_bsc", "torch.nested", "torch.jagged"),
]


def make_corpus():
    """Return valid messages of all types, as pairs of header and data."""
    image = torch.arange(120, dtype=torch.uint8).view(2, 3, 4, 5)
    buffer, record, items = torch.nn.Buffer(torch.ones(2)), Record(a=image), Items([image, 1])
    record.extra, items.size = [image, 1], (2, 3)
    objects = [
        [Volume(image, {"affine": torch.eye(4), "shape": np.ones(3)}), Volume(torch.ones(2)).requires_grad_(), buffer],
        [record, items],
        {"image": image, "label": torch.tensor([1, 2]), "path": ["a", "b"]},
        [image, image[1:], image[:, :, ::2], image.permute(0, 2, 3, 1)],
        {"twice": [image, image], "grad": torch.ones(2, requires_grad=True)},
        [torch.nn.Parameter(torch.ones(2)), torch.ones(2).expand(3, 2), torch.tensor(1.5), torch.empty(0, 4)],
        [Point(torch.ones(2), 3), Box([1, "x"]), Colour.RED, OrderedDict(a=1)],
        [b"x" * 300, b"y" * 200, "\ud800", {(1, b"x"): {1, 2}, b"k" * 200: image}],
        pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False),
        torch.nested.nested_tensor_from_jagged(torch.ones(6), torch.tensor([0, 2, 6]), torch.tensor([1, 3])),
        SCALARS[:7] + SCALARS[8:],
        CONTAINERS,
        *([tensor, tensor.t()] for _, tensor in every_dtype()),
        *([array, array] for array in ARRAYS),
        *quietly(sparse_and_nested).values(),
    ]
    corpus = []
    for obj in objects:
        arena = Arena(np.zeros(8192, np.uint8))
        header = encode(obj, arena)
        corpus.append((header, np.frombuffer(arena._memory, np.uint8)[: arena.used].tobytes()))
    return corpus


class Mutator:
    """Breaks messages at random, the same way for the same seed."""

    def __init__(self, corpus, seed):
        self.corpus, self.random = corpus, random.Random(seed)

    def message(self):
        """Return a header and data, of which at least one is broken."""
        header, data = self.random.choice(self.corpus)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            kind = self.random.random()
            if kind < 0.6:
                header = self.tree(header)
            elif kind < 0.8:
                header = self.flip(header)
            else:
                data = self.flip(data)
        return header, data

    def flip(self, raw):
        """Flip, insert, delete or splice bytes."""
        raw, place = bytearray(raw), self.random.randrange(len(raw) + 1)
        kind = self.random.randrange(5)
        if kind == 0 and place < len(raw):
            raw[place] = self.random.randrange(256)
        elif kind == 1:
            raw[place:place] = self.random.randbytes(self.random.randint(1, 8))
        elif kind == 2:
            del raw[place : place + self.random.randint(1, 8)]
        elif kind == 3:
            other = self.random.choice(self.corpus)[0]
            raw[place:] = other[self.random.randrange(len(other)) :]
        elif raw:
            source = self.random.randrange(len(raw))
            raw[place : place + 8] = raw[source : source + 8]
        return bytes(raw)

    def tree(self, header):
        """Change one place of the tree that the header is."""
        try:
            tree = json.loads(header)
        except (ValueError, RecursionError):
            return self.flip(header)
        places = list(self.places(tree))
        if not places:
            return self.flip(header)
        parent, index = self.random.choice(places)
        kind, node = self.random.randrange(8), parent[index]
        if kind <= 2:
            parent[index] = self.random.choice(VALUES)
        elif kind == 3:
            parent[index] = self.random.choice(NAMES)
        elif kind == 4:
            parent[index] = json.loads(json.dumps(self.random.choice(places)[0]))
        elif kind == 5:
            other, place = self.random.choice(places)
            parent[index], other[place] = other[place], node
        elif kind == 6:
            parent.insert(index, self.random.choice((node, ["l", node], ["u", node])))
        elif isinstance(node, (int, float)):
            parent[index] = node + self.random.choice((-1, 1, 4, -64, 64))
        else:
            del parent[index]
        try:
            return json.dumps(tree, separators=(",", ":")).encode()
        except (ValueError, RecursionError):
            return header

    def places(self, tree):
        """Yield every place of a tree, as a list and an index."""
        stack = [tree] if isinstance(tree, list) else []
        while stack:
            parent = stack.pop()
            for index, node in enumerate(parent):
                yield parent, index
                if isinstance(node, list):
                    stack.append(node)


def leaves(obj):
    """Yield the tensors and arrays of a batch, through containers, dataclasses and named tuples."""
    if isinstance(obj, (torch.Tensor, np.ndarray, bytes, bytearray)):
        yield obj
        yield from leaves(getattr(obj, "_meta", None))
    elif isinstance(obj, PackedSequence):
        yield from (part for part in obj if part is not None)
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from leaves(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from leaves(value)
    elif isinstance(obj, Box):
        yield from leaves([obj.corners, obj.label])


def touch(leaf):
    """Read every element of a leaf, and return how many bytes its elements have."""
    if isinstance(leaf, (bytes, bytearray)):
        return 0
    if isinstance(leaf, np.ndarray):
        return len(leaf.tobytes())
    parts = [leaf]
    with contextlib.suppress(RuntimeError):  # an operation that torch has not got for the dtype
        if leaf.is_nested:
            parts = leaf.unbind()
        elif leaf.layout != torch.strided:
            parts = [leaf._values() if leaf.layout == torch.sparse_coo else leaf.values()]
            if leaf.numel() < 10_000:
                leaf.detach().to_dense().sum()
        for part in parts:
            part.detach().clone().sum()
    return sum(part.nbytes for part in parts)


@pytest.fixture
def _every_warning():
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def try_message(header, data):
    """Decode a message; return what it became, or None when it was refused as it should be."""
    try:
        return decode(header, data)
    except (WireError, BatchTypeError):
        return None


@pytest.mark.usefixtures("_every_warning")
def test_mutated_messages_decode_or_are_refused():
    """Each of many broken messages decodes to something usable within its own size, or is a WireError."""
    mutator = Mutator(make_corpus(), SEED)
    num_decoded = 0
    for number in range(NUM_MUTATIONS):
        header, data = mutator.message()
        try:
            batch = try_message(header, np.frombuffer(bytearray(data), np.uint8))
            if batch is not None:
                num_decoded += 1
                for leaf in leaves(batch):
                    assert quietly(partial(touch, leaf)) <= len(data)
                copies = {id(leaf): len(leaf) for leaf in leaves(batch) if isinstance(leaf, (bytes, bytearray))}
                assert sum(copies.values()) <= len(header) + len(data)
        except BaseException as error:
            error.add_note(f"message {number} of seed {SEED}: {header!r}") if hasattr(error, "add_note") else None
            raise
    # Both outcomes occur often, or the mutations would say little.
    assert 0.02 < num_decoded / NUM_MUTATIONS < 0.8


def test_memory_is_bounded_by_the_message():
    """No message, refused or not, takes more than a constant multiple of its own size."""
    mutator = Mutator(make_corpus(), SEED + 1)
    messages = [mutator.message() for _ in range(min(NUM_MUTATIONS, 2000))]
    messages += [(json.dumps(["lsm-batch", 1, 0, ["l", *([node] * 5000)]]).encode(), b"") for node in (["d"], ["l"], 1)]
    for header, data in messages:  # torch imports modules of its own when it is first needed
        try_message(header, np.frombuffer(bytearray(data), np.uint8))
    tracemalloc.start()
    try:
        for header, data in messages:
            memory = np.frombuffer(bytearray(data), np.uint8)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            batch = try_message(header, memory)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= MEMORY_PER_BYTE * (len(header) + len(data)) + MEMORY_PER_MESSAGE, header
            del batch
    finally:
        tracemalloc.stop()


def test_corpus_is_valid():
    """The messages that are mutated decode, without a warning of torch."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for header, data in make_corpus():
                decode(header, np.frombuffer(bytearray(data), np.uint8))
    finally:
        torch.set_warn_always(False)
