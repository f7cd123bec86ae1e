"""What the short calls between trainers and data hosts carry, checked before anything is done with it. Pure rules.

The other end is of the same version, so that what is unknown is wrong.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from lightning_sm import errors
from lightning_sm.data.protocol.spec import LoaderFacts, Order
from lightning_sm.errors import WireError

_INT64 = 2**63
_MAX_DEPTH = 64

_HOOKS = ("", "train", "val", "test", "predict")
_MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


@dataclass(frozen=True)
class Call:
    """What a trainer tells a data host with one kind of call.

    Attributes:
        name: The method.
        fields: Names of the values, and their types.
    """

    name: str
    fields: Mapping[str, type]

    def parse(self, data: bytes) -> dict[str, Any]:
        """Take a request apart.

        Args:
            data: What came.

        Raises:
            WireError: It is malformed.

        Returns:
            The values; others are left out.
        """
        what = f"{self.name} request"
        facts = _object(data, what)
        values = {name: _value(facts, name, kind, what) for name, kind in self.fields.items()}
        if values.get("loaders", "") not in _HOOKS:
            raise WireError(f"The {what} names unknown loaders: {reprlib.repr(values['loaders'])}.")
        return values


OPEN = Call("Open", {"opening": str, "run": int, "stage": str, "loaders": str, "trainer": dict})
LIST = Call("List", {"opening": str, "loader": int, "seed": int, "epoch": int, "pass_index": int, "num_shards": int})
BEAT = Call("Beat", {"client": str, "world_size": int})
FINISH = Call("Finish", {"client": str, "outcome": str})


def beat_reply(data: bytes) -> dict[str, Any]:
    """Take apart what a data host tells of itself.

    Args:
        data: What came.

    Raises:
        WireError: It is malformed.
    """
    what = "answer to Beat"
    facts = _object(data, what)
    _value(facts, "name", str, what)
    for name in ("workers", "busy", "queued"):
        _value(facts, name, int, what)
    return facts


def open_reply(data: bytes) -> dict[str, Any]:
    """Take apart what a data host says of loaders.

    Args:
        data: What came.

    Raises:
        WireError: It is malformed.

    Returns:
        "state"; or "error", "text" and "where"; or "attributes"; or "structure" and "loaders".
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
    elif set(facts) == {"attributes"}:
        for name in _value(facts, "attributes", dict, what):
            if not name.isidentifier() or name.startswith("__"):
                raise WireError(f"The {what} has the impossible attribute {reprlib.repr(name)}.")
    elif set(facts) == {"structure", "loaders"}:
        loaders = _value(facts, "loaders", list, what)
        for loader in loaders:
            _check_loader(loader)
        _check_structure(facts["structure"], len(loaders), 0)
    else:
        raise WireError(f"The {what} makes no sense: {reprlib.repr(facts)}.")
    return facts


def _check_loader(facts: Any) -> None:
    if not isinstance(facts, dict):
        raise WireError(f"A data host described a loader as {reprlib.repr(facts)}.")
    loader = LoaderFacts.from_json(facts)
    texts = (loader.name, loader.fingerprint, loader.identity, loader.dataset)
    flags = (loader.drop_last, loader.is_split)
    is_typed = all(isinstance(text, str) for text in texts) and all(isinstance(flag, bool) for flag in flags)
    sizes = [size for size in (loader.num_samples, loader.batch_size) if size is not None]
    if not is_typed or loader.order not in get_args(Order) or any(not _is_int(size) for size in sizes):
        raise WireError(f"A data host described a loader in a way that makes no sense: {reprlib.repr(facts)}.")


def _check_structure(part: Any, num_loaders: int, depth: int) -> None:
    """Check that a structure of loaders is one: positions of loaders, and containers around them."""
    if _is_int(part) and 0 <= part < num_loaders:
        return
    parts: Any = None
    if isinstance(part, dict) and depth < _MAX_DEPTH:
        if set(part) == {"dict"} and _are_items(part["dict"]):
            parts = [value for _, value in part["dict"]]
        elif set(part) == {"combined", "of"} and part["combined"] in _MODES:
            parts = [part["of"]]
        elif set(part) in ({"list"}, {"tuple"}):
            parts = next(iter(part.values()))
    if not isinstance(parts, list):
        raise WireError(f"A data host arranged its loaders in a way that makes no sense: {reprlib.repr(part)}.")
    for inner in parts:
        _check_structure(inner, num_loaders, depth + 1)


def _are_items(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, list) and _is_item(item) for item in items)


def _is_item(item: Sequence[Any]) -> bool:
    return len(item) == len(("key", "value")) and isinstance(item[0], (str, int, float, type(None)))


def _is_error(name: str) -> bool:
    error = getattr(errors, name, None)
    return isinstance(error, type) and issubclass(error, errors.DataServiceError)


def _is_int(value: Any) -> bool:
    return type(value) is int and -_INT64 <= value < _INT64


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"The {what} is no JSON: {reprlib.repr(str(error))}.") from error
    if not isinstance(facts, dict):
        raise WireError(f"The {what} is no JSON object: {reprlib.repr(facts)}.")
    return facts


def _value(facts: dict[str, Any], name: str, kind: type, what: str) -> Any:
    value = facts.get(name)
    if not (_is_int(value) if kind is int else isinstance(value, kind)):
        raise WireError(f"The {what} has no {kind.__name__} as {name!r}, but {reprlib.repr(value)}.")
    return value
