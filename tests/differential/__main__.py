"""Runs random scripts twice, by stock Lightning and with a data host, and prints what differs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from lightning_sm import DataHost
from tests.differential.cases import case
from tests.differential.comparison import REASONS, Deviation, deviations
from tests.differential.fits import Twice
from tests.differential.ranks import Ranks


@contextmanager
def compared(num_workers: int = 2) -> Iterator[Callable[[int], list[Deviation]]]:
    """Yield a function that runs a case twice and returns what differs."""
    logging.getLogger("pytorch_lightning").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "case"
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # A data host serves one run at a time.
        hosts = [stack.enter_context(DataHost(workers=num_workers)) for _ in range(2)]
        alone = stack.enter_context(closing(Twice(path, hosts[0].address)))
        ranks = stack.enter_context(closing(Ranks(path, hosts[1].address)))

        def compare(number: int) -> list[Deviation]:
            path.write_text(str(number))
            if case(number).world_size > 1:
                return list(deviations(number, *ranks.run(number)))
            return list(deviations(number, [alone.stock(number)], [alone.ours(number)]))

        yield compare


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
    with compared() as compare:
        for number in range(args.first, args.first + args.cases):
            found = compare(number)
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
