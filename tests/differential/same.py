"""Run random scripts with stock Lightning, and with the workers of their loaders on data hosts: nothing may differ.

The only exception are the random numbers that indexed datasets draw. Each loader has one worker in both runs, so that
no dataset draws from the generators of the training process, which samplers use.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache

import pytest

from lightning_sm import DataHost
from tests.differential.cases import Case, case
from tests.differential.fits import Noted, Pass, Runner, Seen
from tests.differential.ranks import Ranks

_NUM_HOSTS, _NUM_WORKERS = 2, 2


def differences(script: Case, stock: Sequence[Seen], ours: Sequence[Seen]) -> Iterator[str]:
    """Yield a description of each difference.

    Args:
        script: The case.
        stock: Batches and errors of each rank with stock Lightning.
        ours: Batches and errors of each rank with data hosts.
    """
    for rank, (old, new) in enumerate(zip(stock, ours, strict=True)):
        if {*old.errors} != {*new.errors}:
            yield f"rank {rank} fails: {old.errors or 'not'}\n  ours: {new.errors or 'not'}"
        for key in sorted(old.batches.keys() | new.batches.keys()):
            if key.act in old.errors or key.act in new.errors:
                continue
            ran, expected = (_seen(script, key, one.batches.get(key, ())) for one in (new, old))
            if ran != expected:
                yield f"rank {rank}, {key}: {expected}\n  ours: {ran}"


def _seen(script: Case, key: Pass, batches: Sequence[Noted]) -> list[Noted]:
    """Return batches without the random numbers that may differ; streams keep theirs, which must be equal."""
    loaders = script.loaders(key.act, key.stage)
    if loaders.shape == "one" and loaders.has("stream"):
        return [*batches]
    return [batch._replace(draws=[]) for batch in batches]


@contextmanager
def runner(hooks: str = "trainers") -> Iterator[Callable[[int], list[str]]]:
    """Yield a function that runs a case both ways and returns the differences.

    Args:
        hooks: Where the hooks of DataModules run: "trainers" or "data".
    """
    logging.getLogger("pytorch_lightning").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context(), ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")

        def hosts() -> dict[str, list[str]]:
            # A data host serves one run at a time, so the cases of one rank and those of two have their own.
            return {"ours": [stack.enter_context(DataHost(workers=_NUM_WORKERS)).address for _ in range(_NUM_HOSTS)]}

        @cache
        def alone() -> Runner:
            return stack.enter_context(closing(Runner(hosts(), hooks)))

        @cache
        def ranks() -> Ranks:
            return stack.enter_context(closing(Ranks(hosts(), hooks=hooks)))

        def run(number: int) -> list[str]:
            if case(number).world_size > 1:
                stock, ours = ranks().run(number), ranks().run(number, "ours")
            else:
                stock, ours = [alone().run(number)], [alone().run(number, "ours")]
            return list(differences(case(number), stock, ours))

        yield run


def main() -> None:
    """Run cases and print the differences; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="run only cases with this number of ranks")
    parser.add_argument("--hooks", choices=("trainers", "data"), default="trainers")
    args = parser.parse_args()
    numbers = [
        number for number in range(args.first, args.first + args.cases) if args.ranks in (None, case(number).world_size)
    ]
    differing = []
    began = time.monotonic()
    with runner(args.hooks) as run:
        for num_done, number in enumerate(numbers):
            if num_done % 100 == 0:
                sys.stderr.write(f"{num_done} cases done; next: case {number}\n")
            differs = run(number)
            if differs:
                differing.append(number)
                text = "\n".join(difference[:1000] for difference in differs)
                sys.stdout.write(f"case {number}: {case(number).words}\n{text}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(numbers)} cases in {time.monotonic() - began:.0f} s; cases that differ: {differing}\n")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
