"""The short calls between trainers and data hosts: what they carry is checked before anything uses it. Pure rules.

Both ends have the same version, so unknown fields and values are errors.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, get_origin, get_type_hints

from lightning_sm import errors
from lightning_sm.data.protocol.failures import with_place
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.data.protocol.spec import LoaderFacts
from lightning_sm.data.settings import MAX_SHARDS
from lightning_sm.errors import DataServiceError, WireError

_INT64 = 2**63
_MAX_DEPTH = 64

# Names of ranks and hosts, numbers, the values of a Trainer, and how a training ended: an exception's text may be long.
_MAX_REQUEST_BYTES = 1 << 20
# Attributes of a DataModule have up to 64 KB each. A list takes 20 times its bytes once it is parsed.
_MAX_REPLY_BYTES = 32 << 20
_MAX_CONTAINERS = 1 << 18
_MAX_NAME_CHARS = 512
_LONG_TEXTS = ("outcome", "state")
_MAX_TRAINER_FACTS = 64
_RANGES = {
    "world_size": (1, 1 << 16),
    "num_shards": (1, MAX_SHARDS),
    "part": (0, 1 << 16),
    "num_parts": (1, 1 << 16),
    "loader": (0, 1 << 16),
    "batch_size": (0, 1 << 32),
}

_HOOKS = ("", "train", "val", "test", "predict")
_MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


class Request:
    """Base of what a trainer sends to a data host: each kind of call has a frozen dataclass, which is its encoding.

    Fields with a default may be left out. What else is sent is ignored.
    """

    NAME: ClassVar[str]  # of the gRPC method

    def encode(self) -> bytes:
        """Return the bytes of a request."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def parse(cls: type[_Request], data: bytes) -> _Request:
        """Rebuild a request.

        Raises:
            WireError: It is malformed.
        """
        what = f"{cls.NAME} request"
        facts = _object(data, what, _MAX_REQUEST_BYTES)
        kinds = get_type_hints(cls)
        values: dict[str, Any] = {}
        for one in fields(cls):  # type: ignore[arg-type]  # each kind is a dataclass
            if one.name in facts or (one.default is MISSING and one.default_factory is MISSING):
                values[one.name] = _value(facts, one.name, get_origin(kinds[one.name]) or kinds[one.name], what)
        for name, value in values.items():
            least, most = _RANGES.get(name, (-_INT64, _INT64))
            if isinstance(value, int) and not least <= value <= most:
                raise WireError(f"In the {what}, {name} is {value}; {least} to {most} are allowed.")
            if isinstance(value, str) and name not in _LONG_TEXTS and len(value) > _MAX_NAME_CHARS:
                raise WireError(f"In the {what}, {name} has {len(value)} characters; {_MAX_NAME_CHARS} are allowed.")
        request = cls(**values)
        request.check()
        return request

    def check(self) -> None:
        """Check what is special to this kind.

        Raises:
            WireError: It makes no sense.
        """


_Request = TypeVar("_Request", bound=Request)


@dataclass(frozen=True)
class OpenRequest(Request):
    """Asks a data host to run ``setup``, if ``loaders`` is empty, or to open the loaders of a hook.

    Attributes:
        opening: Name of the request; it begins with the run.
        run: Number of the run of the Trainer.
        stage: "fit", "validate", "test" or "predict".
        loaders: "train", "val", "test" or "predict".
        epoch: Epoch for which the hook runs.
        seed: Base of all random states.
        prepares: Whether the host runs ``prepare_data`` first.
        state: The DataModule's state, as JSON; empty: it has none.
        trainer: Values of the Trainer.
    """

    NAME = "Open"

    opening: str
    run: int
    stage: str
    loaders: str
    epoch: int
    seed: int
    prepares: bool
    state: str
    trainer: dict[str, Any]

    @property
    def hook(self) -> str:
        """What runs, for messages."""
        return f"{self.loaders}_dataloader()" if self.loaders else f"setup({self.stage!r})"

    def check(self) -> None:
        """Check that loaders are named after their run, and that the values of the Trainer are few and plain."""
        what = f"{self.NAME} request"
        if self.loaders not in _HOOKS:
            raise WireError(f"The {what} names unknown loaders: {reprlib.repr(self.loaders)}.")
        if not self.opening.startswith(f"{self.run}/"):
            raise WireError(f"The {what} is for run {self.run}, but its name is {reprlib.repr(self.opening)}.")
        plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in self.trainer.values())
        if not plain or len(self.trainer) > _MAX_TRAINER_FACTS:
            raise WireError(
                f"The {what} has {len(self.trainer)} values of the Trainer: {reprlib.repr(self.trainer)}. At most "
                f"{_MAX_TRAINER_FACTS} numbers and texts are allowed."
            )


@dataclass(frozen=True)
class HeartbeatRequest(Request):
    """Says that a rank lives; answered by ``HostReport``.

    Attributes:
        client: The rank.
        world_size: Number of ranks of its training.
        figures: What the rank has measured, once it trains: the JSON of ``RankFigures``.
        wants_figures: Whether the answer is to have the figures of all ranks.
    """

    NAME = "Heartbeat"

    client: str
    world_size: int
    figures: dict[str, Any] = field(default_factory=dict)
    wants_figures: bool = False

    def check(self) -> None:
        """Check the figures."""
        if self.figures:
            RankFigures.from_json(self.figures)


@dataclass(frozen=True)
class FinishRequest(Request):
    """Says that the training of a rank has ended, and how."""

    NAME = "Finish"

    client: str
    outcome: str


@dataclass(frozen=True)
class LoaderPass(Request):
    """A pass over a loader, as data hosts know it.

    Attributes:
        opening: Name of the request that opened the loader.
        loader: Position of the loader among those that the request opened.
        seed: Base of all random states.
        epoch: Epoch of the training.
        pass_index: Number of the pass over the loader within the epoch.
    """

    opening: str
    loader: int
    seed: int
    epoch: int
    pass_index: int

    @property
    def which(self) -> LoaderPass:
        """The pass, without what is requested of it."""
        return LoaderPass(self.opening, self.loader, self.seed, self.epoch, self.pass_index)


@dataclass(frozen=True)
class ListRequest(LoaderPass):
    """Asks for the order of a sampler; answered by ``OrderSize`` and, if it is wanted, the part of a rank.

    Attributes:
        rank: Rank whose part it is.
        world_size: Number of ranks that split the order.
        batch_size: Samples per batch; 0: a key is a batch.
        drop_last: Whether an incomplete last batch is dropped.
        wants_keys: Whether the part of the rank is wanted.
    """

    NAME = "List"

    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    wants_keys: bool


@dataclass(frozen=True)
class CountRequest(LoaderPass):
    """Asks for the batches in every ``num_parts``-th shard of an iterable dataset; answered by ``ShardSizes``.

    Attributes:
        num_shards: Virtual shards of the dataset.
        part: The first of these shards.
        num_parts: Number of parts.
    """

    NAME = "Count"

    num_shards: int
    part: int
    num_parts: int


@dataclass(frozen=True)
class Running:
    """The user's code still runs: the trainer asks again."""


@dataclass(frozen=True)
class Crashed:
    """The process that ran the user's code ended: ``how``, as a predicate."""

    how: str


@dataclass(frozen=True)
class Problem:
    """The user's code failed: the name of an error of lightning_sm, its text, and where on the data host."""

    error: str
    text: str
    where: str = ""

    def exception(self, host: str, source: str) -> DataServiceError:
        """Return the error of the trainer.

        Args:
            host: Name of the data host.
            source: What the user's code is.
        """
        kind: type[DataServiceError] = getattr(errors, self.error)
        return kind(with_place(self.text, ", ".join(filter(None, (f"data host {host}", self.where, source)))))


@dataclass(frozen=True)
class OrderSize:
    """What a sampler yields in one pass.

    Attributes:
        num_samples: Samples of all ranks.
        num_batches: Batches of all ranks; without a batch sampler, samples.
        digest: Equal for equal orders.
        num_keys: Keys of the rank's part, if it is wanted: they follow as raw int64, and after them where each batch
            begins, and where the last one ends.
    """

    num_samples: int
    num_batches: int
    digest: str
    num_keys: int = 0


@dataclass(frozen=True)
class ShardSizes:
    """Batches in the shards of a part, and in shard 0, which all hosts count: are their data the same?"""

    sizes: list[int]
    first: int


_Size = TypeVar("_Size", OrderSize, ShardSizes)


def encode_reply(reply: OrderSize | ShardSizes | Running | Crashed | Problem) -> bytes:
    """Return the bytes of an answer to List or Count."""
    return json.dumps({type(reply).__name__: vars(reply)}).encode()


def parse_reply(data: bytes, size: type[_Size], what: str) -> _Size | Running | Crashed | Problem:
    """Parse an answer to List or Count.

    Args:
        data: The bytes.
        size: What is wanted.
        what: What it is and where it is from, for the error.

    Raises:
        WireError: The answer is malformed.
    """
    facts = _object(data, what)
    for kind in (size, Running, Crashed, Problem):
        hints, values = get_type_hints(kind), facts.get(kind.__name__)
        if not isinstance(values, dict) or values.keys() != hints.keys():
            continue
        if all(_fits(values[name], hint) for name, hint in hints.items()) and _is_error(
            values.get("error", "WireError")
        ):
            return kind(**values)
    raise WireError(f"The {what} is malformed: {reprlib.repr(facts)}.")


def _fits(value: Any, kind: Any) -> bool:
    if kind == list[int]:
        return isinstance(value, list) and all(_fits(item, int) for item in value)
    return _is_int(value) and value >= 0 if kind is int else isinstance(value, kind)


@dataclass(frozen=True)
class HostReport:
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
        figures: The figures of each rank, by its name, if they are wanted: the JSON of ``RankFigures``.
        stream_port: Port for the stream of this rank, if it is another than that of the data host; 0: it is not.
    """

    name: str
    workers: int
    busy: int
    queued: int
    busy_s: float = 0.0
    capacity_s: float = 0.0
    built: int = 0
    built_s: float = 0.0
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    stream_port: int = 0

    def encode(self) -> bytes:
        """Return the bytes of an answer."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> HostReport:
        """Rebuild an answer.

        Raises:
            WireError: It is malformed.
        """
        what = "answer to Heartbeat"
        facts = _object(data, what)
        kinds = get_type_hints(cls)
        values = {one.name: facts[one.name] for one in fields(cls) if one.name in facts}
        for name in {"name", "workers", "busy", "queued", *values}:
            if kinds[name] is not float:
                _value(facts, name, get_origin(kinds[name]) or kinds[name], what)
            elif type(facts[name]) not in (int, float) or not math.isfinite(facts[name]):
                raise WireError(f"In the {what}, {name!r} must be a number, not {reprlib.repr(facts[name])}.")
        report = cls(**values)
        if not 0 <= report.stream_port < 1 << 16:
            raise WireError(f"In the {what}, 'stream_port' is {report.stream_port}; 0 to 65535 are allowed.")
        for figures in report.figures.values():
            RankFigures.from_json(figures)
        return report


def open_reply(data: bytes) -> dict[str, Any]:
    """Parse how a data host describes the loaders that it opened.

    Raises:
        WireError: The answer is malformed.

    Returns:
        "state"; or "error", "text" and "where"; or "attributes" and "missing"; or "structure" and "loaders".
    """
    what = "answer to Open"
    facts = _object(data, what)
    if facts == {"state": "opening"}:
        return facts
    if set(facts) == {"error", "text", "where"}:
        for name in facts:
            _value(facts, name, str, what)
        if not _is_error(facts["error"]):
            raise WireError(f"The {what} has an unknown error: {reprlib.repr(facts['error'])}.")
    elif set(facts) == {"attributes", "missing"}:
        for name in [*_value(facts, "attributes", dict, what), *_value(facts, "missing", list, what)]:
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
                raise WireError(f"The {what} has an invalid attribute name: {reprlib.repr(name)}.")
    elif set(facts) == {"structure", "loaders"}:
        loaders = _value(facts, "loaders", list, what)
        for loader in loaders:
            LoaderFacts.from_json(loader)
        _check_structure(facts["structure"], len(loaders), 0)
    else:
        raise WireError(f"The {what} has an unknown combination of fields: {reprlib.repr(facts)}.")
    return facts


def _check_structure(part: Any, num_loaders: int, depth: int) -> None:
    """Check that a structure consists of positions of loaders, and containers around them."""
    if _is_int(part) and 0 <= part < num_loaders:
        return
    if depth == _MAX_DEPTH:
        raise WireError(f"A data host nested its loaders more than {_MAX_DEPTH} levels deep.")
    match part:
        case {"dict": [*items], **others} if not others and all(_is_item(item) for item in items):
            parts = [value for _, value in items]
        case {"combined": mode, "of": inner, **others} if not others and mode in _MODES:
            parts = [inner]
        case {"list": [*parts], **others} | {"tuple": [*parts], **others} if not others:
            pass
        case _:
            raise WireError(f"A data host sent an invalid structure of loaders: {reprlib.repr(part)}.")
    for inner in parts:
        _check_structure(inner, num_loaders, depth + 1)


def _is_item(item: Any) -> bool:
    """Return whether this is a key and a value of a dict."""
    match item:
        case [str() | int() | float() | None, _]:
            return True
    return False


def _is_error(name: str) -> bool:
    error = getattr(errors, name, None)
    return isinstance(error, type) and issubclass(error, errors.DataServiceError)


def _is_int(value: Any) -> bool:
    return type(value) is int and -_INT64 <= value < _INT64


def _object(data: bytes, what: str, max_bytes: int = _MAX_REPLY_BYTES) -> dict[str, Any]:
    num_containers = data.count(b"[") + data.count(b"{")
    if len(data) > max_bytes or num_containers > _MAX_CONTAINERS:
        raise WireError(
            f"The {what} has {len(data)} bytes with {num_containers} lists and objects; {max_bytes} bytes with "
            f"{_MAX_CONTAINERS} are allowed."
        )
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"The {what} is not valid JSON: {reprlib.repr(str(error))}.") from error
    if not isinstance(facts, dict):
        raise WireError(f"The {what} is not a JSON object: {reprlib.repr(facts)}.")
    return facts


def _value(facts: dict[str, Any], name: str, kind: type, what: str) -> Any:
    value = facts.get(name)
    if not (_is_int(value) if kind is int else isinstance(value, kind)):
        raise WireError(f"In the {what}, {name!r} must be of type {kind.__name__}, not {reprlib.repr(value)}.")
    return value
