"""The short calls between trainers and data hosts: what they carry is checked before anything uses it. Pure rules."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, Union

from msgspec import Meta, field

from lightning_sm import errors
from lightning_sm._structs import Struct
from lightning_sm.data.protocol.codec import (
    AnyInt,
    BatchSize,
    Name,
    Natural,
    NumPlaces,
    Place,
    Port,
    Real,
    decode,
)
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.data.protocol.spec import LoaderDescription, LoaderKind
from lightning_sm.data.settings import MAX_SHARDS
from lightning_sm.errors import DataServiceError, WireError

_MAX_DEPTH = 64

# Names of ranks and hosts, numbers, the values of a Trainer, and how a training ended: an exception's text may be long.
_MAX_REQUEST_BYTES = 1 << 20
# Numbers and strings of a Trainer, by name.
TrainerValues = Annotated[dict[str, bool | AnyInt | Real | str | None], Meta(max_length=64)]
_MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


class Request(Struct, frozen=True):
    """Base of what a trainer sends to a data host."""

    NAME: ClassVar[str]  # of the gRPC method

    @classmethod
    def parse(cls: type[_Request], data: bytes) -> _Request:
        """Rebuild a request.

        Raises:
            WireError: It is malformed.
        """
        return decode(cls, data, f"{cls.NAME} request", _MAX_REQUEST_BYTES)


_Request = TypeVar("_Request", bound=Request)


class OpenRequest(Request, frozen=True):
    """A request to run ``setup``, if ``loaders`` is empty, or to open the loaders of a hook.

    Attributes:
        opening: Name of the request; it begins with ``trainer_run``.
        trainer_run: Number of the Trainer's run.
        stage: "fit", "validate", "test" or "predict".
        loaders: "train", "val", "test" or "predict".
        epoch: Epoch for which the hook runs.
        seed: Base of all random states.
        prepares: Whether the host runs ``prepare_data`` first.
        trainer: Values of the Trainer.
        datamodule: Digest of the snapshot of rank 0's DataModule; empty: the same as for rank 0.
        values: Those of its attributes that are plain values, each as JSON (``plain_json``), by name.
        kept: Names of attributes that were set on rank 0 since ``setup`` has set them, and that stay so.
        earlier: The stages for which ``setup`` has run before on the same DataModule, in order.
        state: Digest of the snapshot of the state for ``load_state_dict``; empty: there is none.
    """

    NAME = "Open"

    opening: Name
    trainer_run: Natural
    stage: Name
    loaders: LoaderKind
    epoch: Natural
    seed: AnyInt
    prepares: bool
    trainer: TrainerValues
    datamodule: Name = ""
    values: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    state: Name = ""

    @property
    def snapshots(self) -> list[str]:
        """Digests of the snapshots that a data host needs for it."""
        return [digest for digest in (self.datamodule, self.state) if digest]

    @property
    def hook(self) -> str:
        """The hook that runs, for messages."""
        return f"{self.loaders}_dataloader()" if self.loaders else f"setup({self.stage!r})"

    def check(self, what: str) -> None:
        """Check that the request is named after its run."""
        if not self.opening.startswith(f"{self.trainer_run}/"):
            raise WireError(f"The {what} is for run {self.trainer_run}, but its name is {reprlib.repr(self.opening)}.")


class LoadRequest(Request, frozen=True):
    """The head of a snapshot that rank 0 sends; its bytes follow.

    Attributes:
        digest: Its digest.
        num_bytes: Its size.
    """

    NAME = "Load"

    digest: Name
    num_bytes: Natural


class HeartbeatRequest(Request, frozen=True):
    """A sign of life of a rank; answered by ``HostReport``.

    Attributes:
        client: The rank.
        world_size: Number of ranks of its training.
        figures: What the rank has measured, once it trains.
        wants_figures: Whether the answer is to have the figures of all ranks.
        host: Its host, for those who look.
    """

    NAME = "Heartbeat"

    client: Name
    world_size: NumPlaces
    figures: RankFigures | None = None
    wants_figures: bool = False
    host: Name = ""


class FinishRequest(Request, frozen=True):
    """The last message of a rank: how its training ended.

    Attributes:
        client: Name of the rank.
        outcome: How it ended, for the log.
        is_success: Whether it had all the batches that it needed.
    """

    NAME = "Finish"

    client: Name
    outcome: str
    is_success: bool = False


class LoaderPass(Request, frozen=True):
    """A pass over a loader, as data hosts know it.

    Attributes:
        opening: Name of the request that opened the loader.
        loader: Position of the loader among those that the request opened.
        seed: Base of all random states.
        epoch: Epoch of the training.
        pass_index: Number of the pass over the loader within the epoch.
        stop: Samples of a sampler (of a batch sampler: batches), of all ranks, after which its order is cut; 0: where
            it ends.
        earlier_stop: The same of the passes of earlier epochs, which leave the sampler in the state before this one.
    """

    opening: Name
    loader: Place
    seed: AnyInt
    epoch: Natural
    pass_index: Natural
    stop: Natural = 0
    earlier_stop: Natural = 0

    @property
    def loader_pass(self) -> LoaderPass:
        """The pass, without what is requested of it."""
        return LoaderPass(
            self.opening,
            self.loader,
            self.seed,
            self.epoch,
            self.pass_index,
            stop=self.stop,
            earlier_stop=self.earlier_stop,
        )


class ListRequest(LoaderPass, frozen=True, kw_only=True):
    """A request for the order of a sampler; answered by ``OrderSize`` and, if it is wanted, the part of a rank.

    Attributes:
        rank: Rank whose part it is.
        world_size: Number of ranks that split the order.
        batch_size: Samples per batch; 0: a key is a batch.
        drop_last: Whether an incomplete last batch is dropped.
        pads: Whether samples repeat so that the batches of all ranks have equal sizes in the last step.
        wants_keys: Whether the part of the rank is wanted.
        timeout_s: For how many seconds the trainer waits.
    """

    NAME = "List"

    rank: Natural
    world_size: NumPlaces
    batch_size: BatchSize
    drop_last: bool
    pads: bool
    wants_keys: bool
    timeout_s: Real


class CountRequest(LoaderPass, frozen=True, kw_only=True):
    """A request to count the batches in every ``num_parts``-th shard of a dataset; answered by ``ShardSizes``.

    Attributes:
        num_shards: Virtual shards of the dataset.
        part: The first of these shards.
        num_parts: Number of parts.
    """

    NAME = "Count"

    num_shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    part: Place
    num_parts: NumPlaces


class Reply(Struct, frozen=True, tag=True):
    """Base of the answers to Open, List and Count, whose encoding names their kind."""


class Running(Reply, frozen=True):
    """The user's code still runs: the trainer asks again."""


class Missing(Reply, frozen=True):
    """The host needs snapshots of rank 0 first, those with these digests; none: rank 0 has not asked yet."""

    snapshots: list[str]


class Crashed(Reply, frozen=True):
    """The process that ran the user's code ended: ``how``, as a predicate."""

    how: str


class Problem(Failure, frozen=True, tag=True):
    """The user's code failed, with an error of lightning_sm."""

    def exception(self, host: str, source: str = "") -> DataServiceError:
        """Return the error of the trainer.

        Args:
            host: Name of the data host.
            source: What the user's code is, if ``where`` does not say it.
        """
        kind: type[DataServiceError] = getattr(errors, self.error)
        return kind(self.at(", ".join(filter(None, (f"data host {host}", self.where, source)))))

    def check(self, what: str) -> None:
        """Check that there is such an error."""
        error = getattr(errors, self.error, None)
        if not isinstance(error, type) or not issubclass(error, DataServiceError):
            raise WireError(f"The {what} has an unknown error: {reprlib.repr(self.error)}.")


class SetUp(Reply, frozen=True):
    """The reply to a request for ``setup``: the attributes that it set on the DataModule.

    Attributes:
        attributes: Its plain values, each as JSON (``plain_json``), by name.
        missing: Names of the other values, which are not copied to trainers.
    """

    attributes: dict[str, str]
    missing: list[str]

    def check(self, what: str) -> None:
        """Check the names."""
        for name in [*self.attributes, *self.missing]:
            if not name.isidentifier() or name.startswith("__"):
                raise WireError(f"The {what} has an invalid attribute name: {reprlib.repr(name)}.")


class Loaders(Reply, frozen=True):
    """The loaders that a hook has returned.

    Attributes:
        structure: Their containers, with positions in place of loaders, see ``describe_structure``.
        loaders: The loaders.
    """

    structure: Any
    loaders: list[LoaderDescription]

    def check(self, what: str) -> None:
        """Check the structure."""
        _check_structure(self.structure, len(self.loaders), what)


class OrderSize(Reply, frozen=True):
    """The size of a sampler's order in one pass.

    Attributes:
        num_samples: Samples of all ranks.
        num_batches: Batches of all ranks; without a batch sampler, samples.
        digest: Equal for equal orders.
        num_keys: Keys of the rank's part, if it is wanted: they follow as raw int64, and after them where each batch
            begins, and where the last one ends.
        is_cut: Whether the sampler has more than the limit of the pass.
    """

    num_samples: Natural
    num_batches: Natural
    digest: str
    num_keys: Natural = 0
    is_cut: bool = False


class ShardSizes(Reply, frozen=True):
    """The numbers of batches in the shards of a part, and in shard 0, which all hosts count to compare their data."""

    sizes: list[Natural]
    first: Natural


def parse_reply(data: bytes, what: str, *kinds: type[Reply] | type[Problem]) -> Any:
    """Parse an answer to Open, List or Count.

    Args:
        data: The bytes.
        what: What it is and where it is from, for the error.
        *kinds: What it may be.

    Raises:
        WireError: The answer is malformed, or of another kind.

    Returns:
        The answer, of one of these kinds.
    """
    return decode(Union[kinds], data, what)  # type: ignore[arg-type]  # noqa: UP007


class HostReport(Struct, frozen=True):
    """The answer to Heartbeat and Status: how a data host is.

    Attributes:
        name: Its name.
        workers: Its workers.
        busy: Workers that build batches.
        queued: Requests that wait for a worker.
        busy_s: Seconds that workers worked while trainers had more to request, of all workers together.
        capacity_s: Seconds that they could have worked in this time.
        built: Requests that they have done.
        built_s: Seconds that these took.
        stuck: The worker that may hang, and the call in which it is; empty: there is none.
        figures: The figures of each rank, by its name, if they are wanted.
        hosts: The trainer host of each rank, by the rank's name; in answers to Status only.
        channels: Names of its input channels; in answers to Status only.
        stream_port: Port for the stream of this rank, if it is another than that of the data host; 0: it is not.
    """

    name: str
    workers: Natural
    busy: Natural
    queued: Natural
    busy_s: Real = 0.0
    capacity_s: Real = 0.0
    built: Natural = 0
    built_s: Real = 0.0
    stuck: str = ""
    figures: dict[str, RankFigures] = field(default_factory=dict)
    stream_port: Port = 0
    hosts: dict[str, str] = field(default_factory=dict)
    channels: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, data: bytes) -> HostReport:
        """Rebuild an answer.

        Raises:
            WireError: It is malformed.
        """
        return decode(cls, data, "answer to Heartbeat")


def put_together(structure: Any, leaf: Callable[[int], Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Return what a hook returned, with something in place of each loader.

    Args:
        structure: The structure of ``Loaders``.
        leaf: Returns what stands in place of the loader at a position.
        combine: Returns what stands in place of a ``CombinedLoader``, from its part and its mode.
    """
    match structure:
        case int():
            return leaf(structure)
        case {"dict": items}:
            return {key: put_together(part, leaf, combine) for key, part in items}
        case {"combined": mode, "of": part}:
            return combine(put_together(part, leaf, combine), mode)
        case {"tuple": parts}:
            return tuple(put_together(part, leaf, combine) for part in parts)
        case {"list": parts}:
            return [put_together(part, leaf, combine) for part in parts]
    raise AssertionError(f"describe_structure() makes no {structure!r}")


def _check_structure(part: Any, num_loaders: int, what: str, depth: int = 0) -> None:
    """Check that a structure consists of positions of loaders, and containers around them."""
    if type(part) is int and 0 <= part < num_loaders:
        return
    if depth == _MAX_DEPTH:
        raise WireError(f"In the {what}, loaders are nested more than {_MAX_DEPTH} levels deep.")
    match part:
        case {"dict": [*items], **others} if not others and all(_is_item(item) for item in items):
            parts = [value for _, value in items]
        case {"combined": mode, "of": inner, **others} if not others and mode in _MODES:
            parts = [inner]
        case {"list": [*parts], **others} | {"tuple": [*parts], **others} if not others:
            pass
        case _:
            raise WireError(f"The {what} has an invalid structure of loaders: {reprlib.repr(part)}.")
    for inner in parts:
        _check_structure(inner, num_loaders, what, depth + 1)


def _is_item(item: Any) -> bool:
    """Return whether this is a key and a value of a dict."""
    match item:
        case [str() | int() | float() | None, _]:
            return True
    return False
