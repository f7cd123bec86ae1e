"""What setup() sets on a data host arrives on the trainers as it was, or does not arrive at all."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.protocol.calls import SetUp, parse_reply
from lightning_sm.data.protocol.plain_values import plain_json, plain_value
from lightning_sm.errors import WireError

# Also what is no Unicode, as in the path of a file in another encoding.
_TEXT = st.text(max_size=5) | st.just("\udc80")
_HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
_PLAIN = st.recursive(
    _HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_HASHABLE, inner, max_size=4)
        | st.tuples(inner)
        | st.sets(_HASHABLE, max_size=4)
    ),
    max_leaves=20,
)


def _after_the_journey(value):
    text = plain_json(value)
    if text is None:
        return None
    reply = parse_reply(SetUp({"value": text}, []).encode(), "answer to Open", SetUp)
    return plain_value(reply.attributes["value"])


def _types(value):
    """The value with the types of everything in it: 1, 1.0 and True are equal."""
    if isinstance(value, dict):
        return "dict", {repr(key): _types(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [_types(inner) for inner in value]
    return type(value), repr(sorted(map(repr, value))) if isinstance(value, set) else repr(value)


@given(_PLAIN)
def test_plain_values_arrive_as_they_were(value):
    """With their types, and dicts with keys of any plain type."""
    assert _types(_after_the_journey(value)) == _types(value)


def test_examples_of_scripts():
    """The labels of a text model, a shape, and a number that is not equal to itself."""
    labels = {0: "neg", 1: "pos"}
    assert _after_the_journey(labels) == labels
    assert _after_the_journey({("a", 1): (3, 32, 32)}) == {("a", 1): (3, 32, 32)}
    assert math.isnan(_after_the_journey([math.nan])[0])
    assert _after_the_journey(OrderedDict(a=1)) == {"a": 1}


@pytest.mark.parametrize(
    "value",
    [
        object(),
        b"bytes",
        [object()],
        {object(): 1},
        namedtuple("Size", "height width")(3, 4),
        "x" * (1 << 16),
        list(range(1 << 16)),
        {"a": [["x" * 1000] * 70]},
    ],
)
def test_other_values_and_large_ones_do_not(value):
    """They are named to the trainers instead."""
    assert plain_json(value) is None


def test_code_of_subclasses_does_not_run():
    """Such as that of a mapping which imports a package when it is read: what it holds itself is taken."""

    class Lazy(dict):
        def items(self):
            raise ImportError("a package that is not installed")

        __iter__ = keys = values = items

    class LazyList(list):
        def __iter__(self):
            raise ImportError("a package that is not installed")

    assert plain_json(Lazy(a=1)) == plain_json({"a": 1})
    assert plain_json(LazyList([1, 2])) == plain_json([1, 2])


def test_a_value_that_holds_itself_does_not():
    """It has no end."""
    endless = []
    endless.append(endless)
    assert plain_json(endless) is None


@pytest.mark.parametrize(
    "encoded",
    [
        {"dict": [[[1], 2]]},
        {"set": [{"dict": []}]},
        {"dict": [[1, 2, 3]]},
        {"dict": 7},
        {"tuple": [], "set": []},
        {"object": []},
        {},
        json.loads("[" * 100 + "]" * 100),
    ],
)
def test_nothing_else_is_read(encoded):
    """A message with anything else is an error that shows it."""
    with pytest.raises(WireError, match="A data host sent an attribute that"):
        plain_value(json.dumps(encoded))
