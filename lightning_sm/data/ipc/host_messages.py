"""The messages between the processes of a data host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.protocol.calls import LoaderPass, Loaders, OpenRequest, Problem, SetUp
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.spec import ShardEnd
from lightning_sm.data.settings import HostSettings


@dataclass(frozen=True)
class Serve(Message):
    """To a process that has started: what it serves.

    Attributes:
        settings: How to serve.
        imports: Modules that will be needed, and that the process imports at once.
    """

    settings: HostSettings
    imports: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Listening(Message):
    """The address at which trainers can connect."""

    address: str


@dataclass(frozen=True)
class StartFailed(Message):
    """The data host cannot serve."""

    text: str


@dataclass(frozen=True)
class Finished(Message):
    """The reason why a data host stops serving.

    Attributes:
        reason: A clause for the log, or the whole text of the error.
        is_error: Whether the host has failed.
    """

    reason: str
    is_error: bool = False


# Between the main process and the server process


@dataclass(frozen=True)
class NewSnapshot(Message):
    """To the main process: a snapshot of rank 0, of which ``fds`` has the memory, and which snapshots to keep."""

    digest: str
    kept: list[str]
    fds: tuple[int, ...]


@dataclass(frozen=True)
class KeptSnapshots(Message):
    """To the server process: the digests of the snapshots that the main process has."""

    digests: list[str]


@dataclass(frozen=True)
class RunHook(Message):
    """To the main process: a trainer's request."""

    request: OpenRequest


@dataclass(frozen=True)
class OpenedLoaders(Message):
    """The reply to a request."""

    opening: str
    reply: SetUp | Loaders | Problem


@dataclass(frozen=True)
class RunSampler(Message):
    """To the main process: a pass whose order it must find out, and for how many seconds trainers wait for it."""

    loader_pass: LoaderPass
    timeout_s: float


@dataclass(frozen=True)
class SamplerOutput(Message):
    """The order of a sampler in a pass.

    Attributes:
        loader_pass: The pass.
        why: How the process that ran the sampler crashed; empty: it did not.
        fds: Memory with a line of JSON, keys and offsets.
    """

    loader_pass: LoaderPass
    why: str
    fds: tuple[int, ...]


# Between the main process and the process of a sampler


@dataclass(frozen=True)
class RunPass(RunSampler):
    """To the process of a sampler: a pass, and the memory for its order."""

    fds: tuple[int, ...]


@dataclass(frozen=True)
class PassWasRun(Message):
    """The answer to a ``RunPass``: ``why`` says how the process that ran it crashed; empty: it did not."""

    why: str


# Between the main process and the server process


@dataclass(frozen=True)
class NewWorker(Message):
    """A worker was started.

    Attributes:
        worker: Its id.
        number: Its number on the host.
        opening: Name of the request that opened its loaders.
        live_openings: Names of those whose loaders are open.
        num_slots: Slots of its ring.
        slot_bytes: Capacity of a slot.
        fds: The connection to it, and its ring.
    """

    worker: int
    number: int
    opening: str
    live_openings: list[str]
    num_slots: int
    slot_bytes: int
    fds: tuple[int, ...]


@dataclass(frozen=True)
class StartWorker(Message):
    """To a worker that is no fork: what it works on.

    Attributes:
        opening: Name of the request that opened its loaders.
        host: Name of the data host.
        number: Its number on the host.
        num_workers: Workers on the host.
        num_slots: Slots of its ring.
        slot_bytes: Capacity of a slot.
        preparation: What multiprocessing tells a process that it spawns: how to import the script.
        fds: Its ring, its mark, the memory for its stack, and the snapshot of the loaders.
    """

    opening: str
    host: str
    number: int
    num_workers: int
    num_slots: int
    slot_bytes: int
    preparation: dict[str, Any]
    fds: tuple[int, ...]


@dataclass(frozen=True)
class WorkerLost(Message):
    """A worker has exited; ``why`` says how."""

    worker: int
    why: str


@dataclass(frozen=True)
class ShowStack(Message):
    """To the main process: a worker has worked on one request for so many seconds."""

    worker: int
    seconds: float


@dataclass(frozen=True)
class WorkerStuck(Message):
    """The answer to a ``ShowStack``: the call in which the worker is."""

    worker: int
    where: str


@dataclass(frozen=True)
class KillWorker(Message):
    """To the main process: a worker hangs."""

    worker: int


@dataclass(frozen=True)
class JobEnds(Message):
    """No more trainers will connect."""


@dataclass(frozen=True)
class TrainerFinished(Message):
    """To the main process: the training of a rank has ended."""

    is_success: bool


# Between the server process and a worker


@dataclass(frozen=True)
class Ready(Message):
    """The worker has started."""


@dataclass(frozen=True)
class Build(Message):
    """To a worker: what to build, an encoded ``StepRangeSpec``, and in which slot."""

    slot: int
    encoded_spec: bytes


@dataclass(frozen=True)
class BuiltRange:
    """The batches of a step range in a worker's slot.

    Attributes:
        num_bytes: How many bytes of the slot are batches.
        pieces: Where its compressed pieces lie in the slot, as (start, size); empty: it is not compressed.
        produce_s: Seconds that the worker took.
        worker: Number of the worker on its host.
    """

    num_bytes: int
    pieces: list[tuple[int, int]]
    produce_s: float
    worker: int = 0


@dataclass(frozen=True)
class BuildAnswer(Message):
    """The answer to a ``Build``.

    Attributes:
        slot: Its slot.
        outcome: The batches, or why there are none.
        encoded_batches: Places and structures of the batches, from ``frames.pack_batches``.
    """

    slot: int
    outcome: BuiltRange | Failure | ShardEnd
    encoded_batches: bytes = b""


# Between the server process and a network process. A number stands for a request of a stream.


@dataclass(frozen=True)
class Fetch(Message):
    """To the server process: a trainer's request, an encoded ``StepRangeSpec``."""

    number: int
    stream: int
    encoded_spec: bytes


@dataclass(frozen=True)
class CancelFetch(Message):
    """To the server process: nobody wants the answer."""

    number: int


@dataclass(frozen=True)
class Release(Message):
    """To the server process: the batches of a ``FetchAnswer`` have been sent."""

    number: int


@dataclass(frozen=True)
class Ping(Message):
    """To a network process, which sends it back."""


@dataclass(frozen=True)
class NewRing(Message):
    """A worker's ring, and the ids of all workers that there are."""

    worker: int
    live_workers: list[int]
    num_slots: int
    slot_bytes: int
    fds: tuple[int, ...]


@dataclass(frozen=True)
class FetchAnswer(Message):
    """The answer to a ``Fetch``.

    Attributes:
        number: Its number.
        outcome: The batches, or why there are none.
        worker: Id of the worker in whose slot the batches lie.
        slot: The slot.
        queue_s: Seconds from the request until the worker started on it.
        encoded_batches: As of ``BuildAnswer``.
    """

    number: int
    outcome: BuiltRange | Failure | ShardEnd
    worker: int = 0
    slot: int = 0
    queue_s: float = 0.0
    encoded_batches: bytes = b""
