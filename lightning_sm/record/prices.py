"""Hourly host prices, which the user provides: they differ by region, contract and year, so none are built in."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from lightning_sm._text import listed
from lightning_sm.errors import JobConfigError
from lightning_sm.job.yaml_file import read_mapping

FILE_FORMAT = """\
currency: $            # printed before each amount; default: $
per_hour:              # an instance type, or the name of an instance group
  ml.g5.xlarge: 1.41
  ml.c5.4xlarge: 0.82
"""
# Amounts of at least this much have two decimals; smaller amounts have two significant digits.
_WHOLE = 1.0
_HOUR_S = 3600.0
_MOST = 1e12  # amounts stay printable


class _PriceFile(msgspec.Struct):
    """The keys of ``FILE_FORMAT``."""

    per_hour: dict[str, Annotated[float, msgspec.Meta(ge=0, lt=_MOST)]]
    currency: str = "$"


@dataclass(frozen=True)
class Prices:
    """Prices of hosts.

    Attributes:
        per_hour: Hourly prices by instance type or instance group name. Groups take precedence.
        currency: The text to show before an amount.
        source: Where the prices come from, for display; empty without prices.
    """

    per_hour: Mapping[str, float] = field(default_factory=dict)
    currency: str = "$"
    source: str = ""

    def __bool__(self) -> bool:
        return bool(self.per_hour)

    def of(self, group: str, instance_type: str | None) -> float | None:
        """Return the hourly price of one host; None if unknown.

        Args:
            group: Name of the host's instance group.
            instance_type: The host's instance type, if known.
        """
        return self.per_hour.get(group, self.per_hour.get(instance_type or ""))

    def total(self, hosts: Iterable[tuple[str, str | None]]) -> float | None:
        """Return the total hourly price of some hosts; None if any price is unknown.

        Args:
            hosts: Group and instance type of each host.
        """
        prices = [self.of(group, instance_type) for group, instance_type in hosts]
        known = [price for price in prices if price is not None]
        return math.fsum(known) if known and len(known) == len(prices) else None

    def gap(self, hosts: Iterable[tuple[str, str | None]]) -> str:
        """Return a sentence about hosts without a price; empty if all have one, or without any prices.

        Args:
            hosts: Group and instance type of each host.
        """
        missing = sorted({kind or group for group, kind in hosts if self.of(group, kind) is None})
        if not missing or not self:
            return ""
        return f"No price for {listed(missing)}. Known prices ({self.source}): {listed(sorted(self.per_hour))}."

    def amount(self, value: float) -> str:
        """Format an amount of money."""
        digits = 2 if value >= _WHOLE or value == 0 else 1 - math.floor(math.log10(value))
        gap = " " if self.currency[-1:].isalpha() else ""
        return f"{self.currency}{gap}{value:,.{digits}f}"


def cost(price_per_hour: float, seconds: float) -> float:
    """Return the cost of running hosts for ``seconds`` at a total price of ``price_per_hour``."""
    return price_per_hour * seconds / _HOUR_S


def add_price_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--prices`` and ``--price``, whose values ``read_prices`` reads."""
    parser.add_argument(
        "--prices", type=Path, metavar="FILE", help="YAML file with hourly prices: {per_hour: {NAME: PRICE}}"
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help="hourly price of one host, by instance type or group: ml.g5.xlarge=1.41; repeatable",
    )


def read_prices(file: Path | None, flags: Sequence[str]) -> Prices:
    """Read the user's prices.

    Args:
        file: A YAML or JSON file like ``FILE_FORMAT``.
        flags: ``NAME=PRICE`` strings, which override the file.

    Raises:
        JobConfigError: The file cannot be read, or a price is not a number.
    """
    given = _PriceFile({})
    if file is not None:
        try:
            given = msgspec.convert(read_mapping(file, "price file", FILE_FORMAT), _PriceFile)
        except msgspec.ValidationError as error:
            raise JobConfigError(f"{file}: {error}. A price file looks like this:\n{FILE_FORMAT}") from error
    prices = given.per_hour
    for flag in flags:
        name, _, value = flag.rpartition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = math.nan
        if not name or not 0 <= prices[name] < _MOST:
            raise JobConfigError(f"--price {flag}: expected NAME=PRICE, for example ml.g5.xlarge=1.41 (per hour).")
    sources = [*([] if file is None else [str(file)]), *(["--price"] if flags else [])]
    return Prices(prices, given.currency, ", ".join(sources))
