"""The messages between the processes of a data host."""

from __future__ import annotations

from msgspec import field

from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.frames import StepRangeHeader
from lightning_sm.data.protocol.openings import CallResult, Opening
from lightning_sm.data.protocol.spec import StreamEnd
from lightning_sm.data.settings import HostSettings


class Serve(Message, frozen=True):
    """To a new process: what to serve, and how.

    Attributes:
        settings: Settings of the data host.
        imports: Modules to import in advance.
        snapshots: Digests of the sources that the main process has, the newest last.
    """

    settings: HostSettings
    imports: list[str] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)


class Listening(Message, frozen=True):
    """The address at which trainers can connect."""

    address: str


class Finished(Message, frozen=True):
    """The reason that a data host stops serving.

    Attributes:
        reason: A clause for the log or, if ``is_error``, the whole text of the error.
        is_error: Whether the host has failed.
    """

    reason: str
    is_error: bool = False


# Between the main process and the server process


class NewSnapshot(Message, frozen=True):
    """To the main process: a source, with its memory in ``fds``, and the digests of the sources to keep."""

    digest: str
    kept: list[str]
    fds: tuple[int, ...]


class StartWorkers(Message, frozen=True):
    """To the main process: start the workers of an opening. The answer is ``StartedWorkers``."""

    opening: Opening


class StartedWorkers(Message, frozen=True):
    """An opening's workers have been started, its hook call has returned a result, or it has failed."""

    name: str
    outcome: Failure | CallResult | None = None


class KeepOpenings(Message, frozen=True):
    """To the main process: the names of the openings that any rank still wants."""

    names: list[str]


class NewWorker(Message, frozen=True):
    """A worker has been started.

    Attributes:
        worker: Id of the worker.
        number: Number of the worker on the host.
        opening: Name of the opening that the worker serves.
        num_slots: Number of slots in the worker's ring.
        slot_bytes: Capacity of a slot.
        fds: Descriptors of the connection to the worker, and of the ring.
    """

    worker: int
    number: int
    opening: str
    num_slots: int
    slot_bytes: int
    fds: tuple[int, ...]


class WorkerLost(Message, frozen=True):
    """A worker has exited; ``why`` describes how."""

    worker: int
    why: str


class KillWorker(Message, frozen=True):
    """To the main process: kill a worker that hangs."""

    worker: int


class JobEnds(Message, frozen=True):
    """No more trainers will connect."""


# Between the server process and a worker


class Ready(Message, frozen=True):
    """The worker has started."""


class Build(Message, frozen=True):
    """To a worker: build the batches of an encoded ``FetchSpec`` in a slot."""

    slot: int
    encoded_spec: bytes


class BuildAnswer(Message, frozen=True):
    """The answer to a ``Build``.

    Attributes:
        slot: Slot named in the request.
        outcome: The size and layout of the batches, or why there are none.
    """

    slot: int
    outcome: StepRangeHeader | Failure | StreamEnd
