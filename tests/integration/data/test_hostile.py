"""Nonsense from either end soon raises a clear error; the other end neither hangs nor exits."""

from __future__ import annotations

import json
import pickle
import queue
import struct
import time

import grpc
import pytest
from torch.utils.data import DataLoader

from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.frames import EncodedBatch, FrameKind, StepRangeHeader, frame, frames
from lightning_sm.errors import BatchTooLargeError, DataServiceError, WireError
from tests.integration.data.cluster import remote
from tests.integration.data.fakes import FakeHost, FakeTrainer

pytestmark = pytest.mark.processes

# Far longer than an error takes, although processes take seconds to start, and far shorter than a trainer waits for
# batches.
SOON_S = 30.0


def framed(request_id, kind, payload, value=0):
    """Return a whole frame."""
    return frame(request_id, kind, len(payload), value) + payload


def header(request_id, num_bytes, structure=bytes(16)):
    """Return a frame that announces a batch."""
    batches = [EncodedBatch(0, num_bytes, structure)]
    return framed(request_id, FrameKind.HEADER, StepRangeHeader(num_bytes, 0.0, 0.0, batches).encode())


ANSWERS = {
    "more bytes than a slot": lambda n: [header(n, 10**15)],
    "data before the header": lambda n: [framed(n, FrameKind.DATA, b"12345678")],
    "data after the end": lambda n: [header(n, 4), framed(n, FrameKind.DATA, b"12345678")],
    "data with a gap": lambda n: [header(n, 100), framed(n, FrameKind.DATA, b"12345678", value=50)],
    "data at the last address": lambda n: [header(n, 100), framed(n, FrameKind.DATA, b"12345678", value=2**64 - 1)],
    "two headers": lambda n: [header(n, 100), header(n, 100)],
    "half a head": lambda n: [header(n, 8)[:10]],
    "half a payload": lambda n: [header(n, 8)[:-1]],
    "a frame of an unknown kind": lambda n: [framed(n, 77, b"")],
    "a request": lambda n: [framed(n, FrameKind.FETCH, b"{}")],
    "a header without numbers": lambda n: [framed(n, FrameKind.HEADER, b"12")],
    "a structure that is none": lambda n: [header(n, 0, b"nonsense")],
    "more than arrived": lambda n: [header(n, 8, struct.pack("<QQ", 0, 16)), framed(n, FrameKind.DATA, b"12345678")],
    "a failure that is no JSON": lambda n: [framed(n, FrameKind.FAILURE, b'{"error": ')],
    "a failure that is a list": lambda n: [framed(n, FrameKind.FAILURE, b"[]")],
    "a failure too deep to parse": lambda n: [framed(n, FrameKind.FAILURE, b"[" * 100_000)],
    "a failure of an unknown kind": lambda n: [
        framed(n, FrameKind.FAILURE, b'{"error": "SystemExit", "text": "", "where": ""}')
    ],
    "a message above the limit": lambda n: [framed(n, FrameKind.DATA, bytes(66 << 20))],
}


def params(rows, *cheap):
    """Return rows as parameters; all but the cheap ones only widen coverage."""
    return [pytest.param(row, marks=[] if row in cheap else [pytest.mark.proof]) for row in rows]


@pytest.mark.parametrize(
    "what",
    params(
        ANSWERS,
        "more bytes than a slot",
        "data at the last address",
        "a structure that is none",
        "a failure too deep to parse",
    ),
)
def test_a_broken_answer_is_an_error_of_the_trainer(what):
    """The trainer reports any broken answer within seconds."""
    host = FakeHost(ANSWERS[what])
    with host.serving() as address, remote([address], batch_timeout_s=60) as module:
        loader = module.train_dataloader()
        began = time.monotonic()
        with pytest.raises(DataServiceError, match=r"\w+") as caught:
            list(loader)
        assert time.monotonic() - began < SOON_S
    kind = BatchTooLargeError if what == "more bytes than a slot" else WireError
    assert type(caught.value) is (DataServiceError if what == "a failure of an unknown kind" else kind), caught.value


REPLIES = {
    "no JSON": b"\xff\xfe",
    "a number": b"1",
    "nothing": b"{}",
    "too deep": b"[" * 100_000,
    "another kind": b'{"type": "Problem", "error": "SystemExit", "text": "", "where": ""}',
}
CHEAP = {("heartbeat", "no JSON"), ("opened", "another kind")}


@pytest.mark.parametrize(
    ("method", "what"),
    [
        pytest.param(method, what, marks=[] if (method, what) in CHEAP else [pytest.mark.proof])
        for method in ("heartbeat", "opened")
        for what in REPLIES
    ],
)
def test_a_nonsensical_answer_to_a_call_is_an_error_of_the_trainer(method, what):
    """The trainer reports a nonsensical answer about the host or its sources within seconds."""
    host = FakeHost()
    setattr(host, method, REPLIES[what])
    began = time.monotonic()
    with (
        host.serving() as address,
        remote([address], startup_timeout_s=60) as module,
        pytest.raises(WireError, match="answer"),
    ):
        next(iter(module.train_dataloader()))
    assert time.monotonic() - began < SOON_S


OPENING = {"name": "x", "source": "y"}
REQUESTS = {
    "OpenSources": [
        b"[" * 100_000,
        b"{}",
        json.dumps({"client": "x", "openings": [{**OPENING, "name": []}]}).encode(),
        json.dumps({"client": "x", "openings": [{**OPENING, "stream": {"rank": -1}}]}).encode(),
        json.dumps({"client": "x", "openings": [OPENING] * (1 << 15)}).encode(),
    ],
    "Heartbeat": [
        b"",
        b"null",
        b'{"client": 7, "world_size": 1}',
        b'{"client": "x", "world_size": "y"}',
        b'{"client": "x", "world_size": 1, "is_last": 7}',
    ],
}


def spec(opening="", **changed):
    """Return an encoded request for two batches that is correct except for the changes."""
    indices = [pickle.dumps([0, 1, 2, 3]), pickle.dumps([4, 5, 6, 7])]
    values = {"rank": 0, "world_size": 1, "seed": 0, "first": 0, "num_batches": 2, "indices": indices}
    return FetchSpec(opening=opening, **{**values, **changed}).encode()


# Messages at which a data host closes the stream, and requests that it answers with a failure.
BROKEN_STREAMS = [
    b"nonsense",
    frame(1, FrameKind.FETCH, 100),
    framed(1, 77, b""),
    framed(1, FrameKind.HEADER, b""),
    framed(1, FrameKind.FETCH, b""),
    framed(1, FrameKind.FETCH, b"\x91" * 100_000),
    framed(1, FrameKind.FETCH, b"\x92\x01\x02"),
    framed(1, FrameKind.FETCH, spec()[:-1]),
    framed(1, FrameKind.FETCH, spec(seed=1.5)),
    framed(1, FrameKind.FETCH, spec(first=-1)),
    framed(1, FrameKind.FETCH, spec(num_batches=3)),
    framed(1, FrameKind.FETCH, spec(num_batches=10**9, indices=[])),
    bytes(66 << 20),
]
FAILING_SPECS = [{"indices": [b"nonsense"] * 2}, {"indices": [pickle.dumps([2**62])] * 2}]


def assert_survives(address, opening):
    """Send every kind of wrong message to a data host whose loaders are open."""
    with FakeTrainer(address) as trainer:
        for name, requests in REQUESTS.items():
            for request in requests:
                with pytest.raises(grpc.RpcError) as caught:
                    trainer.call(name, request)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, request[:80])
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            trainer.call("Heartbeat", bytes(70 << 20))
        for message in BROKEN_STREAMS:
            assert trainer.any_call("Fetch", message) in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
        for request in (spec("other"), *(spec(opening, **changed) for changed in FAILING_SPECS)):
            requests = queue.SimpleQueue()
            requests.put(framed(7, FrameKind.CANCEL, b"") + framed(8, FrameKind.FETCH, request))
            call = trainer.conversation(iter(requests.get, None))
            request_id, kind, _, _ = next(frames(next(call)))
            assert (request_id, kind) == (8, FrameKind.FAILURE)
            requests.put(None)
            call.cancel()


def test_a_data_host_survives_what_trainers_say(pool):
    """Nonsense is refused per call and per stream, and other trainers get their batches before and after."""
    host = pool.serve(lambda: DataLoader(list(range(8)), batch_size=4))[0]
    with remote([host]) as module:
        loader = module.train_dataloader()
        assert len(list(loader)) == 2
        assert_survives(host.address, loader._kept_workers[0].opening.source)
        assert len(list(loader)) == 2
