"""The short calls between trainers and data hosts: what they carry is checked before anything uses it. Pure rules.

Both ends have the same version, so unknown fields and values are errors.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

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

# What a data host tells about the work of its workers, see ``WorkerPool.state``.
_WORK = ("busy_s", "capacity_s", "built", "built_s")

_HOOKS = ("", "train", "val", "test", "predict")
_MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


@dataclass(frozen=True)
class Call:
    """What a trainer sends to a data host with one kind of call.

    Attributes:
        name: The gRPC method.
        fields: Names of the values, and their types.
        optional: The same of values that may be left out.
    """

    name: str
    fields: Mapping[str, type]
    optional: Mapping[str, type] = field(default_factory=dict)

    def parse(self, data: bytes) -> dict[str, Any]:
        """Return the values of a request, without any others that it has.

        Raises:
            WireError: The request is malformed.
        """
        what = f"{self.name} request"
        facts = _object(data, what, _MAX_REQUEST_BYTES)
        sent = {**self.fields, **{name: kind for name, kind in self.optional.items() if name in facts}}
        values = {name: _value(facts, name, kind, what) for name, kind in sent.items()}
        for name, value in values.items():
            least, most = _RANGES.get(name, (-_INT64, _INT64))
            if isinstance(value, int) and not least <= value <= most:
                raise WireError(f"In the {what}, {name} is {value}; {least} to {most} are allowed.")
            if isinstance(value, str) and name not in _LONG_TEXTS and len(value) > _MAX_NAME_CHARS:
                raise WireError(f"In the {what}, {name} has {len(value)} characters; {_MAX_NAME_CHARS} are allowed.")
        if values.get("loaders", "") not in _HOOKS:
            raise WireError(f"The {what} names unknown loaders: {reprlib.repr(values['loaders'])}.")
        if "run" in values:
            _check_opening(values, what)
        if "figures" in values:
            RankFigures.from_json(values["figures"])
        return values


def _check_opening(values: Mapping[str, Any], what: str) -> None:
    """Check that loaders are named after their run, and that the values of the Trainer are few and plain."""
    opening, run, trainer = values["opening"], values["run"], values["trainer"]
    if not opening.startswith(f"{run}/"):
        raise WireError(f"The {what} is for run {run}, but its name is {reprlib.repr(opening)}.")
    plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in trainer.values())
    if not plain or len(trainer) > _MAX_TRAINER_FACTS:
        raise WireError(
            f"The {what} has {len(trainer)} values of the Trainer: {reprlib.repr(trainer)}. At most "
            f"{_MAX_TRAINER_FACTS} numbers and texts are allowed."
        )


OPEN = Call(
    "Open",
    {
        "opening": str,
        "run": int,
        "stage": str,
        "loaders": str,
        "epoch": int,
        "seed": int,
        "prepares": bool,
        "state": str,
        "trainer": dict,
    },
)
# A rank's figures, once it trains; rank 0 wants those of all ranks.
HEARTBEAT = Call("Heartbeat", {"client": str, "world_size": int}, {"figures": dict, "wants_figures": bool})
FINISH = Call("Finish", {"client": str, "outcome": str})


@dataclass(frozen=True)
class LoaderPass:
    """A pass over a loader, as data hosts know it.

    Attributes:
        opening: Name of the request that opened the loader.
        loader: Position of the loader among those that the request opened.
        seed: Base of all random states.
        epoch: Epoch of the training.
        pass_index: Number of the pass over the loader within the epoch.
    """

    NAME: ClassVar[str]

    opening: str
    loader: int
    seed: int
    epoch: int
    pass_index: int

    @property
    def which(self) -> LoaderPass:
        """The pass, without what is requested of it."""
        return LoaderPass(self.opening, self.loader, self.seed, self.epoch, self.pass_index)

    def encode(self) -> bytes:
        """Return the bytes of a request."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def parse(cls: type[_Request], data: bytes) -> _Request:
        """Rebuild a request.

        Raises:
            WireError: It is malformed.
        """
        kinds = get_type_hints(cls)
        return cls(**Call(cls.NAME, {one.name: kinds[one.name] for one in fields(cls)}).parse(data))


_Request = TypeVar("_Request", bound=LoaderPass)


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


def heartbeat_reply(data: bytes) -> dict[str, Any]:
    """Parse how a data host describes itself.

    Raises:
        WireError: The answer is malformed.
    """
    what = "answer to Heartbeat"
    facts = _object(data, what)
    _value(facts, "name", str, what)
    for name in ("workers", "busy", "queued"):
        _value(facts, name, int, what)
    for name in _WORK:
        value = facts.get(name, 0)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise WireError(f"In the {what}, {name!r} must be a number, not {reprlib.repr(value)}.")
    if "stream_port" in facts and not 0 < _value(facts, "stream_port", int, what) < 1 << 16:
        raise WireError(f"In the {what}, 'stream_port' is {facts['stream_port']}; 1 to 65535 are allowed.")
    if "figures" in facts:
        for figures in _value(facts, "figures", dict, what).values():
            RankFigures.from_json(figures)
    return facts


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
