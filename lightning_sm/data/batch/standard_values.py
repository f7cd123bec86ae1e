"""Values of Python's standard library and of torch that are sent as plain parts: paths, dates, decimals, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from lightning_sm.data.batch import format as batch_format


def _of_text(cls: Any) -> Callable[[Any], Any]:
    def from_parts(parts: Any) -> Any:
        if type(parts) is not str:
            raise ValueError(f"the text of a {cls.__name__} is a {type(parts).__name__}")
        return cls(parts)

    return from_parts


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in batch_format.NAMES_OF_DTYPES:
        raise ValueError(f"tensors of {dtype} cannot be sent either")
    return batch_format.NAMES_OF_DTYPES[dtype]


def _clock(value: Any) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold]


def _datetime_from_parts(parts: Any) -> datetime:
    year, month, day, *clock, zone, fold = parts
    return datetime.combine(date(year, month, day), _time_from_parts([*clock, zone, fold]))


def _time_from_parts(parts: Any) -> time:
    hour, minute, second, microsecond, zone, fold = parts
    return time(hour, minute, second, microsecond, _zone(zone), fold=fold)


def _zone(zone: Any) -> timezone | None:
    if zone is not None and type(zone) is not timezone:
        raise ValueError(f"a time zone is a {type(zone).__name__}")
    return zone


def _zone_parts(zone: timezone) -> list[Any]:
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    return [offset] if name == timezone(offset).tzname(None) else [offset, name]


STANDARD_VALUES: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (torch.device, str, _of_text(torch.device)),
    (torch.dtype, _dtype_name, lambda parts: batch_format.DTYPES[parts]),
    (Decimal, str, _of_text(Decimal)),
    *((cls, str, _of_text(cls)) for cls in (PosixPath, PurePosixPath, PureWindowsPath)),
    (date, lambda day: [day.year, day.month, day.day], lambda parts: date(*parts)),
    (datetime, lambda at: [at.year, at.month, at.day, *_clock(at)], _datetime_from_parts),
    (time, _clock, _time_from_parts),
    (timedelta, lambda span: [span.days, span.seconds, span.microseconds], lambda parts: timedelta(*parts)),
    (timezone, _zone_parts, lambda parts: timezone(*parts)),
]
