"""Each kind of broken or malicious message is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import PosixPath

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_sm.data.batch import format as batch_format
from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.batch.encode import encode
from lightning_sm.errors import WireError
from tests.fakes.batches import Point, header, make_slot

T = ["t", 0, "float32", [2], None, 0]
BROKEN = {
    "not JSON": b"{",
    "not UTF-8": b'"\xff"',
    "not a header": b"[1, 2]",
    "other format": b'["zip", 1, 0, null]',
    "other version": header(None, version=2),
    "object": header({"a": 1}),
    "unknown node": header(["?"]),
    "empty node": header([]),
    "tag that is not a string": header([["l"]]),
    "NaN": b'["lsm-batch",1,0,NaN]',
    "huge int": b'["lsm-batch",1,0,' + b"9" * 5000 + b"]",
    "too deep for JSON": b'["lsm-batch",1,0,' + b"[" * 100_000,
    "negative bytes": header(None, used=-1),
    "more bytes than there are": header(None, used=1000),
    "terabyte": header(["t", 0, "float32", [10**12], [0], 0], 64),
    "overflow": header(["t", 0, "float32", [2**32, 2**32, 2**32], None, 0], 64),
    "empty overflow": header(["t", 0, "float32", [0, 2**62, 2**62], None, 0], 64),
    "negative shape": header(["t", 0, "float32", [-1], None, 0], 64),
    "boolean shape": header(["t", 0, "float32", [True], None, 0], 64),
    "negative stride": header(["t", 0, "float32", [2], [-1], 0], 64),
    "stride too few": header(["t", 0, "float32", [2, 2], [1], 0], 64),
    "too many dimensions": header(["t", 0, "float32", [1] * 65, None, 0], 64),
    "beyond the end": header(["t", 64, "float32", [1], None, 0], 64),
    "gaps beyond the end": header(["t", 0, "float32", [2], [16], 0], 64),
    "negative offset": header(["t", -4, "float32", [1], None, 0], 64),
    "misaligned": header(["t", 2, "float32", [1], None, 0], 64),
    "fractional offset": header(["t", 0.0, "float32", [1], None, 0], 64),
    "quantized": header(["t", 0, "quint8", [1], None, 0], 64),
    "dtype that is not a string": header(["t", 0, [], [1], None, 0], 64),
    "gradient of integers": header(["t", 0, "int32", [1], None, 1], 64),
    "unknown flags": header(["t", 0, "float32", [1], None, 4], 64),
    "object array": header(["a", 0, "|O8", [1], None], 64),
    "comma dtype": header(["a", 0, "i4,f4", [1], None], 64),
    "record beyond its size": header(["a", 0, [4, ["x", "<i8", 0, []]], [1], None], 64),
    "record of records": header(["a", 0, json.loads('[8,["x",' * 9 + '"<i8"' + ",0,[]]]" * 9), [1], None], 64),
    "record of nothing": header(["a", 0, [0], [10**15], None], 64),
    "array of no bytes": header(["a", 0, "<U0", [10**12], None], 64),
    "overlapping array": header(
        [
            "a",
            0,
            "<i4",
            [10**12],
            [0],
        ],
        64,
    ),
    "array beyond the end": header(["a", 60, "<i8", [1], None], 64),
    "scalar of wrong size": header(["n", "<i8", "00"]),
    "scalar that is not hexadecimal": header(["n", "<i8", 5]),
    "impossible character": header(["n", "<U1", "ffffffff"]),
    "reference to nothing": header(["r", 0]),
    "reference that is not a number": header(["r", None]),
    "bytes again and again": header(["l", *[["B", 0, 64]] * 2], 64),
    "dictionary without value": header(["d", 1]),
    "repeated key": header(["d", 1, 2, 1, 3]),
    "list as key": header(["d", ["l"], 2]),
    "list in a set": header(["set", ["l"]]),
    "impossible float": header(["f", "00"]),
    "impossible int": header(["i", "x"]),
    "scalar that is not a string": header(["i", 5]),
    "impossible range": header(["range", 0, 1, 0]),
    "object without a value": header(["x", f"{Point.__module__}:Point", ["x", "y"], None, [], []]),
    "object of another value": header(["x", f"{Point.__module__}:Record", None, ["l"], [], []]),
    "object with a value too few": header(["x", f"{Point.__module__}:Point", ["x", "y"], ["u", 1], [], []]),
    "object with an attribute too few": header(["x", f"{Point.__module__}:Record", None, ["d"], ["x"], []]),
    "object with a repeated attribute": header(["x", f"{Point.__module__}:Record", None, ["d"], ["x", "x"], [1, 2]]),
    "object with a nameless attribute": header(["x", f"{Point.__module__}:Record", None, ["d"], [1], [1]]),
    "object without a field": header(["x", f"{Point.__module__}:Box", ["corners", "label"], None, [], []]),
    "object without a place for attributes": header(
        ["x", f"{Point.__module__}:Point", ["x", "y"], ["u", 1, 2], ["z"], [3]]
    ),
    "object of a reference": header(
        [
            "l",
            ["x", f"{Point.__module__}:Volume", None, T, [], []],
            ["x", f"{Point.__module__}:Volume", None, ["r", 0], [], []],
        ],
        64,
    ),
    "tensor class of something else": header(["x", f"{Point.__module__}:Volume", None, 1, [], []]),
    "tensor class of a jagged tensor": header(
        [
            "x",
            f"{Point.__module__}:Volume",
            None,
            ["p", "torch.jagged", ["l", T, ["t", 0, "int64", [1], None, 0], None, 1, False]],
            [],
            [],
        ],
        64,
    ),
    "deque without a length": header(["deque"]),
    "deque of a negative length": header(["deque", -1]),
    "deque longer than its length": header(["deque", 1, 1, 2]),
    "defaultdict of a function": header(["default", "exit"]),
    "defaultdict without a value": header(["default", "int", 1]),
    "bytearray beyond the end": header(["A", 0, 100], 64),
    "bytearray again and again": header(["l", *[["A", 0, 64]] * 2], 64),
    "date that is none": header(["p", "datetime:date", ["l", 2024, 13, 1]]),
    "time in a zone that is none": header(["p", "datetime:time", ["l", 1, 1, 1, 1, "UTC", 0]]),
    "path that is no text": header(["p", f"{PosixPath.__module__}:PosixPath", 5]),
    "dtype that torch has not": header(["p", "torch:dtype", "qint8"]),
    "sparse out of bounds": header(
        ["p", "torch.sparse_coo", ["l", ["t", 0, "int64", [1, 1], None, 0], T, ["l", 0], False, False]], 64
    ),
    "sparse size overflow": header(
        ["p", "torch.sparse_coo", ["l", ["t", 0, "int64", [2, 1], None, 0], T, ["l", 2**61, 4], False, False]], 64
    ),
    "rows that do not grow": header(
        [
            "p",
            "torch.sparse_csr",
            ["l", ["t", 0, "int64", [2], None, 0], ["t", 0, "int64", [2], None, 0], T, ["l", 1, 5], False],
        ],
        64,
    ),
    "sparse of something else than a tensor": header(
        ["p", "torch.sparse_coo", ["l", 1, T, ["l", 0], False, False]], 64
    ),
    "nested beyond its values": header(["p", "torch.nested", ["l", T, ["l", ["l", 3]], False]], 64),
    "nested of different dimensions": header(["p", "torch.nested", ["l", T, ["l", ["l", 1], ["l", 1, 1]], False]], 64),
    "jagged of no dimension": header(
        ["p", "torch.jagged", ["l", T, ["t", 0, "int64", [2], None, 0], None, 2, False]], 64
    ),
    "jagged of scattered offsets": header(
        ["p", "torch.jagged", ["l", T, ["t", 0, "int64", [1, 1], None, 0], None, 1, False]], 64
    ),
    "jagged with a negative length": header(
        [
            "p",
            "torch.jagged",
            ["l", T, ["t", 0, "int64", [1], None, 0], ["t", 0, "int64", [1], None, 0], 1, False],
        ],
        64,
    ),
    "packed sequence of no batches": header(
        ["p", "torch.nn.utils.rnn:PackedSequence", ["l", T, ["t", 0, "int64", [2], None, 0], None, None]], 64
    ),
    "packed sequence of floats": header(["p", "torch.nn.utils.rnn:PackedSequence", ["l", T, T, None, None]], 64),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_message_is_refused(name):
    """A broken or malicious message is a WireError, and no other error."""
    with pytest.raises(WireError):
        decode(BROKEN[name], make_slot(64))


def test_a_header_full_of_lists_takes_no_memory():
    """Lists cost 20 times their bytes: a header with more of them than any batch has is refused before it is parsed."""
    message = b'["lsm-batch",1,0,["l"' + b',["l"]' * (batch_format.MAX_LISTS + 1) + b"]]"
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=r"has 4194307 lists; 4194304 are allowed"):
            decode(message, make_slot(0))
        assert tracemalloc.get_traced_memory()[1] < len(message)
    finally:
        tracemalloc.stop()


def test_jagged_lengths_and_packed_orders_are_checked():
    """Lengths beyond the values, and an order that is not a permutation, are refused."""
    arena = Arena(make_slot())
    values, offsets = torch.ones(5), torch.tensor([0, 2, 5])
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([2, 2]))
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    head = encode([jagged, packed], arena)
    data = np.frombuffer(arena._memory, np.uint8)
    received = decode(head, data)
    assert received[0].lengths().tolist() == [2, 2]
    received[0].lengths()[1] = 4
    with pytest.raises(WireError, match="lengths of a jagged tensor are beyond"):
        decode(head, data)
    received[0].lengths()[1] = 2
    received[1].sorted_indices[0] = 5
    with pytest.raises(WireError, match="not a permutation"):
        decode(head, data)
