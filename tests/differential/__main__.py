"""Runs random scripts twice, by stock Lightning and with a data host, and prints what differs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

from lightning_sm import DataHost
from tests.differential.cases import case
from tests.differential.comparison import deviations
from tests.differential.deviation import REASONS, Deviation
from tests.differential.fits import Runner, Seen
from tests.differential.randomness import changes, repeated_draws
from tests.differential.ranks import Ranks

# Workers of the data hosts that run a case, and of those that run it again.
_WORKERS = {"ours": (2,), "again": (1, 1)}


class Runs(NamedTuple):
    """What each rank of a case saw.

    Attributes:
        stock: By stock Lightning.
        ours: With data hosts.
        again: With others.
    """

    stock: list[Seen]
    ours: list[Seen]
    again: list[Seen]

    def deviations(self, number: int) -> list[Deviation]:
        """Return what differs.

        Args:
            number: Number of the case.
        """
        found = [*deviations(number, self.stock, self.ours), *changes(self.ours, self.again)]
        return [*found, *repeated_draws(number, self.ours)]


@contextmanager
def runner() -> Iterator[Callable[[int], Runs]]:
    """Yield a function that runs a case by stock Lightning and twice with data hosts."""
    logging.getLogger("pytorch_lightning").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")

        def hosts() -> dict[str, list[str]]:
            return {
                name: [stack.enter_context(DataHost(workers=workers)).address for workers in own]
                for name, own in _WORKERS.items()
            }

        # A data host serves one run at a time.
        alone = stack.enter_context(closing(Runner(hosts())))
        ranks = stack.enter_context(closing(Ranks(hosts())))

        def run(number: int) -> Runs:
            names = (None, *_WORKERS)
            if case(number).world_size > 1:
                return Runs(*(ranks.run(number, name) for name in names))
            return Runs(*([alone.run(number, name)] for name in names))

        yield run


def main() -> None:
    """Run cases, and print the deviations and a table of them; exit with 1 if one has no reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    num_cases: Counter[str] = Counter()
    explained: Counter[str] = Counter()
    unexplained = []
    began = time.monotonic()
    with runner() as run:
        for number in range(args.first, args.first + args.cases):
            found = run(number).deviations(number)
            reasons = {deviation.reason for deviation in found}
            num_cases[f"{case(number).world_size} ranks"] += 1
            num_cases["without a deviation" if not found else "with one"] += 1
            explained.update(reason for reason in reasons if reason is not None)
            if None in reasons:
                unexplained.append(number)
                _print(number, [deviation for deviation in found if deviation.reason is None])
    rows = [f"| {text} | {explained[reason]} |\n" for reason, text in REASONS.items()]
    sys.stdout.write(f"{args.cases} cases ({dict(num_cases)}) in {time.monotonic() - began:.0f} s\n\n")
    sys.stdout.write(
        "".join(["| deviation | cases |\n|---|---|\n", *rows, f"| without a reason | {len(unexplained)} |\n"])
    )
    sys.stdout.write(f"without a reason: {unexplained}\n")
    sys.exit(bool(unexplained))


def _print(number: int, found: list[Deviation]) -> None:
    sys.stdout.write(f"case {number}: {case(number).words}\n")
    for one in found:
        sys.stdout.write(f"  {one.where}: {one.what}\n    stock: {_short(one.stock)}\n    ours:  {_short(one.ours)}\n")
    sys.stdout.flush()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 700 else f"{text[:350]} ... {text[-350:]}"


if __name__ == "__main__":
    main()
