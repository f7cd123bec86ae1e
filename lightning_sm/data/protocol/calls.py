"""The short calls between trainers and data hosts: what they carry is checked before anything uses it. Pure rules.

Both ends have the same version, so unknown fields and values are errors.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_sm import errors
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.data.protocol.spec import LoaderFacts
from lightning_sm.data.settings import MAX_SHARDS
from lightning_sm.errors import WireError

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
_PASS = {"opening": str, "loader": int, "seed": int, "epoch": int, "pass_index": int}
# The order of a sampler: its size and digest, and if it is wanted, the part of a rank. Batch size 0: a key is a batch.
_PART = {"rank": int, "world_size": int, "batch_size": int, "drop_last": bool, "wants_keys": bool}
LIST = Call("List", {**_PASS, **_PART})
# The batches in the shards of an iterable dataset that are one of several parts.
COUNT = Call("Count", {**_PASS, "num_shards": int, "part": int, "num_parts": int})
# A rank's figures, once it trains; rank 0 wants those of all ranks.
HEARTBEAT = Call("Heartbeat", {"client": str, "world_size": int}, {"figures": dict, "wants_figures": bool})
FINISH = Call("Finish", {"client": str, "outcome": str})


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
