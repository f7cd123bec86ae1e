"""Calls of a Trainer that fail in stock Lightning or with data hosts, and why one may fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.differential.cases import Case
from tests.differential.deviation import Deviation
from tests.differential.fits import Seen


def failures(script: Case, stock: Sequence[Seen], ours: Sequence[Seen]) -> Iterator[Deviation]:
    """Yield the calls of a Trainer that fail on one side only.

    Args:
        script: The case.
        stock: What each rank saw by stock Lightning.
        ours: What each rank saw with data hosts.
    """
    old, new = (_errors(ranks) for ranks in (stock, ours))
    for number in sorted(old.keys() ^ new.keys()):
        reason_of = _reason_of_our_refusal if number in new else _reason_of_refusal
        errors = new if number in new else old
        # Later calls of a Trainer that failed have its error.
        failed = next(first for first, error in errors.items() if error == errors[number])
        reason = reason_of(script, failed, errors[number])
        where = f"{number} {script.acts[number].method}"
        yield Deviation(where, "one fails", old.get(number), new.get(number), reason)


def _errors(ranks: Sequence[Seen]) -> dict[int, str]:
    """The errors of the first rank that has one, by call of a Trainer."""
    return dict(sorted({number: error for seen in reversed(ranks) for number, error in seen.errors.items()}.items()))


def _reason_of_our_refusal(script: Case, number: int, error: str) -> str | None:
    train = script.loaders(number, "train")
    is_unsplit = script.world_size > 1 and not script.trainer.get("use_distributed_sampler", True)
    has_own = any(map(train.has, ("own", "torch's batch sampler", "counts its passes")))
    return "own sampler not split" if "leaves the split over" in error and is_unsplit and has_own else None


def _reason_of_refusal(script: Case, number: int, error: str) -> str | None:
    act = script.acts[number]
    hooks = script.hooks[act.hooks]
    used = [hooks.train, hooks.evaluation] if act.method == "fit" else [hooks.evaluation]
    # On several ranks, data hosts also count the batches of a stream.
    unsized = ("without length", "stream") if script.world_size > 1 else ("without length",)
    if any(loaders.has(word) for loaders in used for word in unsized) and (
        "using an IterableDataset" in error or "using an `IterableDataset`" in error or "`__len__`" in error
    ):
        return "unsized"
    if any(loaders.has("own") for loaders in used) and "inject a (distributed) sampler into your batch" in error:
        return "batch sampler refused"
    is_uneven = any(part.size % script.world_size for loaders in used for part in loaders.parts)
    if is_uneven and "Try at least" in error:  # a fraction of the batches of the rank that has fewer
        return "padding"
    keeps_split = "overfit_batches" in script.trainer and not script.trainer.get("use_distributed_sampler", True)
    if keeps_split and any(loaders.has("DistributedSampler") for loaders in used) and "Try at least" in error:
        return "DistributedSampler kept"
    if any(loaders.has("torch's batch sampler") for loaders in used) and "overfit_batches" in script.trainer:
        return "batch sampler replaced"
    return None
