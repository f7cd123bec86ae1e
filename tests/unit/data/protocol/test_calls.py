"""The messages of short calls are validated: anything unexpected is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from lightning_sm.data.protocol import calls, openings
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.message_codec import decode
from lightning_sm.errors import WireError
from lightning_sm.record.data_figures import HostFigures, RankFigures

PROBLEM = Failure("RemoteTransformError", "no file 'a'", "unpickling the dataset")
REPLY = openings.OpeningsReply(["a"], ["d" * 32], {"b": PROBLEM})
STREAM = openings.StreamWorker(rank=1, world_size=2, number=0, num_workers=3, seed=-5)
OPENINGS = {"client": "rank 0 on algo-1", "openings": [openings.Opening("a", "d" * 32, STREAM, is_alone=True)]}
HEARTBEAT = {"client": "rank 0 on algo-1", "world_size": 4}
TRAINING = {**HEARTBEAT, "figures": RankFigures(), "wants_figures": True}


def parse_reply(data):
    """Parse an answer to OpenSources."""
    return decode(openings.OpeningsReply, data, "answer to OpenSources")


def parser(kind):
    """Return a function that decodes a request, as a data host does."""
    return lambda data: decode(kind, data, kind.__name__, calls.MAX_REQUEST_BYTES)


PARSERS = [
    parser(calls.HeartbeatRequest),
    calls.HostReport.parse,
    parser(openings.OpeningsRequest),
    parse_reply,
    lambda data: decode(openings.CallResult, data, "result"),
]
NAMES = st.sampled_from(
    ["type", "OpeningsReply", "error", "text", "where", "open", "missing", "problems", "client", "openings", "stream"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=3),
)


def encoded(value):
    """Encode a value as it is sent."""
    return json.dumps(value, default=asdict).encode()


def test_text_that_is_not_unicode_travels_with_escapes():
    """Text that is not valid Unicode is escaped, as in a traceback with a file name in another encoding."""
    sent = replace(REPLY, problems={"b": replace(PROBLEM, text="no file 'caf\udce9'", traceback="\N{SNOWMAN}")})
    assert parse_reply(sent.encode()).problems["b"].text == r"no file 'caf\udce9'"
    assert parse_reply(REPLY.encode()) == REPLY


def test_the_result_of_a_hook_comes_through():
    """The result of a hook may consist of any bytes."""
    result = openings.CallResult(bytes(range(256)), {"dataset": "Numbers of 3"})
    assert decode(openings.CallResult, result.encode(), "result") == result


PROBLEM_FIELDS = {**asdict(PROBLEM), "type": "Failure"}


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"type": "Finished", "open": [], "missing": []},
        {"open": []},
        {"open": [7], "missing": []},
        {"open": [], "missing": [], "surprise": 7},
        {"open": [], "missing": [], "problems": {"a": {**PROBLEM_FIELDS, "where": None}}},
        [],
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_is_a_wire_error(reply):
    """Answers with unknown fields, or with values that the trainer cannot use, are refused."""
    with pytest.raises(WireError, match="answer to OpenSources"):
        parse_reply(encoded(reply))


@given(st.sampled_from(PARSERS), VALUES)
def test_any_json_is_taken_or_refused(parse, value):
    """Any JSON is accepted, or refused with a WireError."""
    with contextlib.suppress(WireError):
        parse(encoded(value))


@given(st.sampled_from(PARSERS), st.binary(max_size=50))
def test_any_bytes_are_taken_or_refused(parse, data):
    """Any bytes, even if they are not JSON, are accepted or refused with a WireError."""
    with contextlib.suppress(WireError):
        parse(data)


@pytest.mark.parametrize(
    ("call", "request_", "changed", "why"),
    [
        (calls.HeartbeatRequest, HEARTBEAT, {"fds": [0]}, r"The HeartbeatRequest is malformed: .* unknown field `fds`"),
        (openings.OpeningsRequest, OPENINGS, {"openings": [{"name": "x" * 513, "source": "d"}]}, "length <= 512 - at"),
        (openings.OpeningsRequest, OPENINGS, {"openings": [OPENINGS["openings"][0]] * 16385}, "length <= 16384|bytes"),
        (
            openings.OpeningsRequest,
            OPENINGS,
            {"openings": [openings.Opening("a", "d", replace(STREAM, num_workers=0))]},
            r"`int` >= 1 - at `\$.openings\[0\].stream.num_workers`",
        ),
        (calls.HeartbeatRequest, HEARTBEAT, {"world_size": 0}, r"`int` >= 1 - at `\$.world_size`"),
        (calls.HeartbeatRequest, HEARTBEAT, {"world_size": 10**9}, r"`int` <= 65536 - at `\$.world_size`"),
        (calls.HeartbeatRequest, HEARTBEAT, {"client": "x" * 513}, r"length <= 512 - at `\$.client`"),
        (calls.HeartbeatRequest, HEARTBEAT, {"surprise": "x" * (1 << 20)}, "has 1048[0-9]+ bytes .* 1048576 bytes"),
        (
            calls.HeartbeatRequest,
            HEARTBEAT,
            {"surprise": [[]] * (1 << 18)},
            "26214[0-9] lists and objects; .* 262144 lists and objects are allowed",
        ),
        (
            calls.HeartbeatRequest,
            TRAINING,
            {"figures": {"wait": 1.0}},
            r"HeartbeatRequest is malformed: .*unknown field `wait` - at `\$.figures`",
        ),
        (calls.HeartbeatRequest, TRAINING, {"figures": [1.0]}, r"got `array` - at `\$.figures`"),
        (calls.HeartbeatRequest, HEARTBEAT, {"is_last": 1}, r"`bool`, got `int` - at `\$.is_last`"),
        (calls.HeartbeatRequest, TRAINING, {"wants_figures": 1}, r"`bool`, got `int` - at `\$.wants_figures`"),
    ],
)
def test_a_request_is_bounded(call, request_, changed, why):
    """A valid request is accepted; the refusal of an invalid one names what arrived and what is allowed."""
    parse = parser(call)
    assert parse(encoded(request_)) == call(**request_)
    with pytest.raises(WireError, match=why):
        parse(encoded({**request_, **changed}))


@pytest.mark.parametrize(
    "change",
    [
        {"host": {"name": "a", "busy_s": "1"}},
        {"host": {"name": "a", "capacity_s": float("nan")}},
        {"host": {"name": "a", "num_built": None}},
        {"host": {"name": "a", "built_s": True}},
        {"host": {"name": 7}},
        {"figures": 1},
        {"figures": {"rank 1": {"wait": 1.0}}},
        {"surprise": 7},
    ],
    ids=str,
)
def test_impossible_figures_of_a_host_are_refused(change):
    """Impossible figures are refused, because reports compute with them."""
    reply = {"host": HostFigures("a", workers=1, busy_s=0.5, capacity_s=1.0, num_built=2, built_s=3.5), "busy": 0}
    reply["figures"] = {"rank 1": RankFigures()}
    assert calls.HostReport.parse(encoded(reply)) == calls.HostReport(**reply)
    with pytest.raises(WireError):
        calls.HostReport.parse(encoded({**reply, **change}))
