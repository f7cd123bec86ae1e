"""Nonsense from either end is an error that says so, soon; the other end neither hangs nor ends."""

from __future__ import annotations

import json
import queue
import time

import grpc
import numpy as np
import pytest
from msgspec.structs import replace
from torch.utils.data import DataLoader

from lightning_sm.data.protocol.calls import Loaders, OrderSize, SetUp
from lightning_sm.data.protocol.frames import EncodedBatch, FrameKind, StepRangeHeader, frame, frames, pack_batches
from lightning_sm.data.protocol.spec import BatchSpec, StepRangeSpec
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.errors import BatchTooLargeError, DataServiceError, WireError
from tests.fakes.requests import count_request, open_request
from tests.integration.data.cluster import remote
from tests.integration.data.datasets import Data
from tests.integration.data.fakes import LOADER, FakeHost, FakeTrainer

pytestmark = pytest.mark.processes

# Far more than it takes, although processes start for seconds, and far less than a trainer waits for batches.
SOON_S = 30.0


def framed(request_id, kind, payload, value=0):
    """Return a whole frame."""
    return frame(request_id, kind, len(payload), value) + payload


def header(request_id, num_bytes, structure=b'["lsm-batch",1,0,null]'):
    """Return a frame that announces a batch."""
    batches = pack_batches([EncodedBatch(0, num_bytes, structure)])
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
    "more than arrived": lambda n: [header(n, 8, b'["lsm-batch",1,16,null]'), framed(n, FrameKind.DATA, b"12345678")],
    "a failure that is no JSON": lambda n: [framed(n, FrameKind.FAILURE, b'{"error": ')],
    "a failure that is a list": lambda n: [framed(n, FrameKind.FAILURE, b"[]")],
    "a failure too deep to parse": lambda n: [framed(n, FrameKind.FAILURE, b"[" * 100_000)],
    "a failure of an unknown kind": lambda n: [
        framed(n, FrameKind.FAILURE, b'{"error": "SystemExit", "text": "", "where": ""}')
    ],
    "a message above the limit": lambda n: [framed(n, FrameKind.DATA, bytes(66 << 20))],
}


def params(rows, *cheap):
    """Rows, of which all but some only widen what these show."""
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
    """Whatever a data host sends in place of a batch, the trainer names it within seconds."""
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
    "an unknown error": b'{"type": "Problem", "error": "SystemExit", "text": "", "where": ""}',
    "a field of the feeder": b'{"type": "SetUp", "attributes": {}, "missing": [], "opening": "x"}',
    "a magic attribute": b'{"type": "SetUp", "attributes": {"__class__": "1"}, "missing": []}',
    "loaders that nobody asked for": Loaders({"list": []}, []).encode(),
}


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("heartbeat", "no JSON"),
        ("opened", "a magic attribute"),
        *(
            pytest.param(method, what, marks=pytest.mark.proof)
            for method in ("heartbeat", "opened")
            for what in REPLIES
            if (method, what) not in {("heartbeat", "no JSON"), ("opened", "a magic attribute")}
        ),
    ],
)
def test_a_nonsensical_answer_to_a_call_is_an_error_of_the_trainer(method, what):
    """Whatever a data host says of itself or of its loaders, the trainer names it within seconds."""
    host = FakeHost()
    setattr(host, method, REPLIES[what] if method == "heartbeat" else {"": REPLIES[what]})
    began = time.monotonic()
    with (
        host.serving() as address,
        pytest.raises(WireError, match="answer to"),
        remote([address], startup_timeout_s=60),
    ):
        pass
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("name", ["transfer_batch_to_device", "train_dataloader", "hparams"])
def test_a_data_host_cannot_replace_hooks_of_the_datamodule(name):
    """A value for a name that the DataModule's class has as a function or property is an error that names both."""
    host = FakeHost()
    host.opened[""] = SetUp({name: "7"}, []).encode()
    expected = rf"setup\(\) set {name}=7, but in the class Data on this trainer {name} is a (function|property)"
    with host.serving() as address, pytest.raises(WireError, match=expected), remote([address]):
        pass


class Digits(Data):
    """Has a default for what its ``setup`` will know."""

    num_classes = None


def test_a_data_host_may_replace_defaults_of_the_class():
    """A number that setup() sets in place of a default of the class reaches the trainer."""
    host = FakeHost()
    host.opened[""] = SetUp({"num_classes": "10"}, []).encode()
    with host.serving() as address:
        module = RemoteDataModule(Digits(list), [address])
        module.setup("fit")
        module.teardown("fit")
    assert module.num_classes == 10


class Text(Data):
    """Has what its ``setup`` will replace: as a default of the class, and in the object."""

    vocabulary = None

    def __init__(self, make):
        super().__init__(make)
        self.train_set = None
        self.transform = "none"


def test_what_is_not_copied_does_not_look_as_if_setup_had_not_run(caplog):
    """What was None is an error that says so, of object and class alike; what had another value is named in the log."""
    host = FakeHost()
    missing = ["train_set", "transform", "vocabulary"]
    labels = '{"dict": [[0, "neg"], [1, "pos"]]}'
    host.opened[""] = SetUp({"id2label": labels}, missing).encode()
    with host.serving() as address:
        module = RemoteDataModule(Text(list), [address])
        module.setup("fit")
        module.teardown("fit")
    assert module.id2label == {0: "neg", 1: "pos"}
    for name in ("train_set", "vocabulary"):
        with pytest.raises(AttributeError, match=f"Text has no attribute '{name}' on a trainer.*run on the data hosts"):
            getattr(module, name)
    assert module.transform == "none"
    (warning,) = [text for text in caplog.messages if "setup() has replaced" in text]
    assert "replaced transform of Text on the data hosts by values that are not copied" in warning


def test_an_attribute_that_is_not_plain_is_an_error():
    """A data host of another version, or none of ours, cannot make anything else of it."""
    host = FakeHost()
    host.opened[""] = SetUp({"labels": '{"object": "os.system"}'}, []).encode()
    with host.serving() as address, pytest.raises(WireError, match="is not a plain value"), remote([address]):
        pass


def listing(num_samples, num_batches, num_keys):
    """Return the head of an answer to List."""
    return OrderSize(num_samples, num_batches, "d", num_keys).encode() + b"\n"


LISTINGS = [
    b"",
    b"nonsense",
    b"[]\n",
    b"{}\n",
    b"[" * 100_000,
    b'{"type": "OrderSize", "num_samples": 9, "num_batches": 9}\n',
    listing("x", 1, 0),
    listing(9, 9, 9) + b"12345678",
    listing(1, 1, 1) + np.array([0, 0, 1000], "<i8").tobytes(),
    listing(1, 2, 1) + np.array([0, 0, -7, 1], "<i8").tobytes(),
]


@pytest.mark.parametrize("number", params(range(len(LISTINGS)), 4, 8))
def test_a_nonsensical_listing_is_an_error_of_the_trainer(number):
    """A list of keys that is none ends the pass within seconds."""
    host = FakeHost(lambda _: [], replace(LOADER, order="sampler"))
    host.listed = LISTINGS[number]
    with host.serving() as address, remote([address], batch_timeout_s=60) as module:
        began = time.monotonic()
        with pytest.raises(
            DataServiceError, match=r"answer of data host fake|order from data host fake|came in|offsets"
        ):
            next(iter(module.train_dataloader()))
        assert time.monotonic() - began < SOON_S


OPENING = open_request(epoch=9)
REQUESTS = {
    "Open": [
        b"[" * 100_000,
        b"{}",
        *(json.dumps({**OPENING, name: []}).encode() for name in OPENING),
        json.dumps({**OPENING, "opening": "2/fit/x/0", "loaders": "teardown"}).encode(),
        json.dumps({**OPENING, "trainer_run": 10**30}).encode(),
    ],
    "Count": [b"1", b"{}", json.dumps(count_request(part="x")).encode()],
    "List": [b"1", b'{"opening": 1}', json.dumps({"opening": "x", "loader": True, "seed": 0}).encode()],
    "Heartbeat": [b"", b'{"client": 7, "world_size": 1}', b'{"client": "x", "world_size": "y"}'],
    "Finish": [b"null", b'{"client": "x"}'],
}


def spec(opening="", **changed):
    """Return an encoded request for a batch that is right but for what is changed."""
    spec = {"opening": opening, "loader": 0, "compression": ""}
    batch = {"seed": 0, "epoch": 0, "pass_index": 0, "order_length": 8, "position": 0, "keys": np.arange(4)}
    batch.update((name, value) for name, value in changed.items() if name in batch)
    spec.update((name, value) for name, value in changed.items() if name in spec)
    return StepRangeSpec(**spec, batches=(BatchSpec(**batch),)).encode()


# What a data host closes the stream at, and what it answers.
BROKEN_STREAMS = [
    b"nonsense",
    frame(1, FrameKind.FETCH, 100),
    framed(1, 77, b""),
    framed(1, FrameKind.HEADER, b""),
    framed(1, FrameKind.FETCH, b""),
    framed(1, FrameKind.FETCH, b"[" * 100_000 + b"\n"),
    framed(1, FrameKind.FETCH, b"[1,2]\n"),
    framed(1, FrameKind.FETCH, spec()[:-1]),
    framed(1, FrameKind.FETCH, spec(seed=1.5)),
    framed(1, FrameKind.FETCH, spec(seed=10**300)),
    bytes(66 << 20),
]
FAILING_SPECS = [
    {"loader": -1},
    {"loader": 99},
    {"keys": np.array([-(2**63), 2**63 - 1])},
    {"seed": -(2**63), "order_length": -5, "position": 2**63 - 1, "keys": np.array([100])},
    {"order_length": 0},
]


def assert_survives(address, opening):
    """Say everything wrong that there is to a data host whose loaders are open."""
    with FakeTrainer(address) as trainer:
        for name, requests in REQUESTS.items():
            for request in requests:
                with pytest.raises(grpc.RpcError) as caught:
                    trainer.stream(name, request) if name == "List" else trainer.call(name, request)
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
    """Nonsense is refused, call by call and stream by stream, and others get their batches before and after."""
    host = pool.serve(lambda: DataLoader(list(range(8)), batch_size=4))[0]
    with remote([host]) as module:
        loader = module.train_dataloader()
        assert len(list(loader)) == 2
        assert_survives(host.address, loader.place.request_name)
        assert len(list(loader)) == 2
