"""What the short calls carry is checked: nothing but what was meant comes through."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from lightning_sm.data.protocol import calls
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.errors import WireError
from tests.fakes.requests import count_request, list_request, open_request

LOADER = LoaderDescription(
    name="train_dataloader()",
    order="shuffled",
    num_samples=103,
    batch_size=10,
    drop_last=False,
    fingerprint="f",
    identity="i",
    dataset="Numbers of 103",
)
OPENED = (calls.SetUp, calls.Loaders, calls.Problem, calls.Running)
PARSERS = [
    calls.OpenRequest.parse,
    calls.ListRequest.parse,
    calls.CountRequest.parse,
    calls.HeartbeatRequest.parse,
    calls.FinishRequest.parse,
    calls.HostReport.parse,
    lambda data: calls.parse_reply(data, "answer to Open", *OPENED),
    lambda data: calls.parse_reply(data, "order", calls.OrderSize, calls.Running, calls.Crashed, calls.Problem),
    lambda data: calls.parse_reply(data, "count", calls.ShardSizes, calls.Running, calls.Problem),
]

REPLIES = [
    calls.Running(),
    calls.Problem("RemoteTransformError", "Traceback", "setup('fit')"),
    calls.SetUp({"num_classes": "7", "names": '["a", "b"]'}, ["train_set"]),
    calls.Loaders(0, [LOADER]),
    calls.Loaders({"list": []}, []),
    calls.Loaders({"dict": [["a", 0], [1, {"combined": "max_size", "of": {"tuple": [1]}}]]}, [LOADER] * 2),
    calls.Loaders(0, [replace(LOADER, num_samples=None, batch_size=None, order="shards")]),
]
NAMES = st.sampled_from(
    [kind.__name__ for kind in OPENED]
    + ["error", "text", "where", "attributes", "missing", "structure", "loaders", "dict", "list", "of"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("opening"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=3),
)


def encoded(value):
    """Return a value as it travels."""
    return json.dumps(value, default=asdict).encode()


@pytest.mark.parametrize("reply", REPLIES, ids=repr)
def test_an_answer_that_makes_sense_comes_through_unchanged(reply):
    """Loaders in any containers, attributes, errors and "not yet" are passed on as they are."""
    assert calls.parse_reply(reply.encode(), "answer to Open", *OPENED) == reply


def test_text_that_is_not_unicode_travels_with_escapes():
    """As in the traceback of an error about a file whose name is in another encoding."""
    sent = calls.Problem("RemoteTransformError", "no file 'caf\udce9'", traceback="\N{SNOWMAN}")
    received = calls.parse_reply(sent.encode(), "answer to Open", *OPENED)
    assert received == replace(sent, text=r"no file 'caf\udce9'")


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"type": ["Running", "SetUp"], "attributes": {}, "missing": []},
        {"type": "Running", "state": "closed"},
        {"type": 7},
        {"type": "OrderSize", "num_samples": 1, "num_batches": 1, "digest": "d", "num_keys": 0},
        {"type": "Problem", "error": "RemoteTransformError", "text": "", "where": None},
        {"type": "Problem", "error": "logging", "text": "", "where": ""},
        {"type": "SetUp", "attributes": {"a b": "1"}, "missing": []},
        {"type": "SetUp", "attributes": {}, "missing": ["__class__"]},
        {"type": "SetUp", "attributes": {}, "missing": [7]},
        {"type": "SetUp", "attributes": {}, "missing": [], "kind": "batch"},
        {"type": "Loaders", "structure": 0, "loaders": []},
        {"type": "Loaders", "structure": -1, "loaders": [asdict(LOADER)]},
        {"type": "Loaders", "structure": False, "loaders": [asdict(LOADER)]},
        {"type": "Loaders", "structure": {"dict": [[["a"], 0]]}, "loaders": [asdict(LOADER)]},
        {"type": "Loaders", "structure": {"dict": [0]}, "loaders": [asdict(LOADER)]},
        {"type": "Loaders", "structure": {"combined": "any", "of": 0}, "loaders": [asdict(LOADER)]},
        {"type": "Loaders", "structure": {"set": [0]}, "loaders": [asdict(LOADER)]},
        {"type": "Loaders", "structure": json.loads('{"list":[' * 99 + "0" + "]}" * 99), "loaders": [asdict(LOADER)]},
        {"type": "Loaders", "structure": 0, "loaders": ["shuffled"]},
        {"type": "Loaders", "structure": 0, "loaders": [{**asdict(LOADER), "order": "other"}]},
        {"type": "Loaders", "structure": 0, "loaders": [{**asdict(LOADER), "num_samples": -1}]},
        {"type": "Loaders", "structure": 0, "loaders": [{**asdict(LOADER), "num_samples": 10**30}]},
        {"type": "Loaders", "structure": 0, "loaders": [{**asdict(LOADER), "batch_size": True}]},
        {"type": "Loaders", "structure": 0, "loaders": [{**asdict(LOADER), "name": 7}]},
        {"type": "Loaders", "structure": 0, "loaders": [{**asdict(LOADER), "surprise": 7}]},
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_is_a_wire_error(reply):
    """Unknown words, impossible numbers, and what the trainer would trip over are refused."""
    with pytest.raises(WireError, match="answer to Open"):
        calls.parse_reply(encoded(reply), "answer to Open", *OPENED)


@given(st.sampled_from(PARSERS), VALUES)
def test_any_json_is_taken_or_refused(parse, value):
    """Whatever comes, the only error is a WireError."""
    with contextlib.suppress(WireError):
        parse(encoded(value))


@given(st.sampled_from(PARSERS), st.binary(max_size=50))
def test_any_bytes_are_taken_or_refused(parse, data):
    """What is no JSON is a WireError, too."""
    with contextlib.suppress(WireError):
        parse(data)


def test_a_request_with_what_was_not_asked_for_is_refused():
    """Names that mean something between the processes of a data host do not get there from outside."""
    request = list_request(seed=1, epoch=2, pass_index=3)
    with pytest.raises(WireError, match=r"The List request is malformed: .* unknown field `fds`"):
        calls.ListRequest.parse(encoded({**request, "fds": [0]}))


OPEN = open_request("", trainer={"a": 1.5})
LIST = list_request(seed=1, epoch=2, pass_index=3)
COUNT = count_request(seed=1)
HEARTBEAT = {"client": "rank 0 on algo-1", "world_size": 4}
TRAINING = {**HEARTBEAT, "figures": RankFigures(), "wants_figures": True}


@pytest.mark.parametrize(
    ("call", "request_", "changed", "why"),
    [
        (calls.OpenRequest, OPEN, {"opening": "2/fit//0"}, "is for run 1, but its name is '2/fit//0'"),
        (calls.OpenRequest, OPEN, {"opening": "1/" + "x" * 512}, r"`str` of length <= 512 - at `\$.opening`"),
        (calls.OpenRequest, OPEN, {"trainer": {"a": [1]}}, r"got `array` - at `\$.trainer"),
        (calls.OpenRequest, OPEN, {"trainer": dict.fromkeys(map(str, range(65)))}, r"length <= 64 - at `\$.trainer`"),
        (calls.OpenRequest, OPEN, {"surprise": "x" * (1 << 20)}, "has 1048[0-9]+ bytes .* 1048576 bytes"),
        (
            calls.OpenRequest,
            OPEN,
            {"surprise": [[]] * (1 << 18)},
            "26214[67] lists and objects; .* 262144 are allowed",
        ),
        (calls.CountRequest, COUNT, {"num_shards": 2**20 + 1}, r"`int` <= 1048576 - at `\$.num_shards`"),
        (calls.CountRequest, COUNT, {"num_parts": 0}, r"`int` >= 1 - at `\$.num_parts`"),
        (calls.CountRequest, COUNT, {"part": -1}, r"`int` >= 0 - at `\$.part`"),
        (calls.ListRequest, LIST, {"batch_size": -1}, r"`int` >= 0 - at `\$.batch_size`"),
        (calls.ListRequest, LIST, {"wants_keys": 1}, r"`bool`, got `int` - at `\$.wants_keys`"),
        (calls.ListRequest, LIST, {"loader": -1}, r"`int` >= 0 - at `\$.loader`"),
        (calls.HeartbeatRequest, HEARTBEAT, {"world_size": 0}, r"`int` >= 1 - at `\$.world_size`"),
        (calls.HeartbeatRequest, HEARTBEAT, {"world_size": 10**9}, r"`int` <= 65536 - at `\$.world_size`"),
        (calls.HeartbeatRequest, HEARTBEAT, {"client": "x" * 513}, r"length <= 512 - at `\$.client`"),
        (
            calls.HeartbeatRequest,
            TRAINING,
            {"figures": {"wait": 1.0}},
            r"Heartbeat request is malformed: .*unknown field `wait` - at `\$.figures`",
        ),
        (calls.HeartbeatRequest, TRAINING, {"figures": [1.0]}, r"got `array` - at `\$.figures`"),
        (calls.HeartbeatRequest, TRAINING, {"wants_figures": 1}, r"`bool`, got `int` - at `\$.wants_figures`"),
    ],
)
def test_a_request_is_bounded(call, request_, changed, why):
    """What is too much of anything is refused with what came and what is allowed; the rest is taken."""
    assert call.parse(encoded(request_)) == call(**request_)
    with pytest.raises(WireError, match=why):
        call.parse(encoded({**request_, **changed}))


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        (calls.OrderSize, calls.OrderSize(8, 2, "d", num_keys=4)),
        (calls.ShardSizes, calls.ShardSizes([3, 0], first=3)),
        (calls.OrderSize, calls.Running()),
        (calls.OrderSize, calls.Crashed("was killed by SIGKILL")),
        (calls.ShardSizes, calls.Problem("RemoteTransformError", "KeyError", "worker 3")),
    ],
)
def test_an_answer_to_list_or_count_comes_through(kind, reply):
    """What was encoded is parsed as what it was."""
    kinds = (kind, calls.Running, calls.Crashed, calls.Problem)
    assert calls.parse_reply(reply.encode(), "answer", *kinds) == reply


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"type": "Running", "more": 1},
        {"type": "ShardSizes", "sizes": [], "first": 0},
        {"type": "OrderSize", "num_samples": -1, "num_batches": 1, "digest": "d", "num_keys": 0},
        {"type": "OrderSize", "num_samples": 1, "num_batches": True, "digest": "d", "num_keys": 0},
        {"type": "OrderSize", "num_samples": 1, "num_batches": 1, "digest": 7, "num_keys": 0},
        {"type": "Problem", "error": "SystemExit", "text": "", "where": ""},
        {"type": "Problem", "error": 7, "text": "", "where": ""},
        {"type": "ListRequest", **list_request()},
    ],
    ids=str,
)
def test_a_malformed_answer_to_list_is_a_wire_error(reply):
    """It names the answer."""
    with pytest.raises(WireError, match=r"[Tt]he order"):
        calls.parse_reply(encoded(reply), "order", calls.OrderSize, calls.Running, calls.Crashed, calls.Problem)


def test_an_answer_is_bounded_in_lists():
    """Lists that would take 20 times their bytes on the trainer are refused before they are parsed."""
    reply = calls.SetUp({"boxes": "[]" * (1 << 18)}, [])
    with pytest.raises(WireError, match=r"answer to Open has .* 262147 lists and objects; .* 262144 are allowed"):
        calls.parse_reply(reply.encode(), "answer to Open", *OPENED)


@pytest.mark.parametrize(
    "change",
    [
        {"busy_s": "1"},
        {"capacity_s": float("nan")},
        {"built": None},
        {"built_s": True},
        {"figures": 1},
        {"figures": {"rank 1": {"wait": 1.0}}},
        {"name": 7},
        {"surprise": 7},
        {"stream_port": 1 << 16},
    ],
    ids=str,
)
def test_impossible_figures_of_a_host_are_refused(change):
    """Reports compute with them."""
    reply = {
        "name": "a",
        "workers": 1,
        "busy": 0,
        "queued": 0,
        "busy_s": 0.5,
        "capacity_s": 1,
        "built": 2,
        "built_s": 3.5,
    }
    reply["figures"] = {"rank 1": RankFigures()}
    assert calls.HostReport.parse(encoded(reply)) == calls.HostReport(**reply)
    with pytest.raises(WireError):
        calls.HostReport.parse(encoded({**reply, **change}))
