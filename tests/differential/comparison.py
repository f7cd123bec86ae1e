"""What differs between the batches of stock Lightning and those of data hosts, and which differences are documented.

A documented difference is believed only where the batches are those that the documentation promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.differential.cases import Act, Case, Loaders, Part, case
from tests.differential.fits import Pass, Seen, plain

# Documented in docs/heterogeneous-clusters.md, or refused by stock Lightning.
REASONS = {
    "unsized": "a sampler without length: stock refuses fractions, or does not validate; data hosts count its batches",
    "batch sampler refused": "stock refuses a batch sampler that is not a BatchSampler under DDP and overfit_batches",
    "own sampler not split": "use_distributed_sampler=False with a sampler that knows no rank: data hosts refuse it",
    "batch sampler replaced": "stock replaces the sampler or the batch size of a torch BatchSampler; data hosts do not",
    "batch sampler not shared": "a batch sampler of another class: in stock, each rank predicts all of its batches",
    "overfit_batches": "a random batch sampler: stock trains on other batches in each epoch, data hosts on the same",
    "counting sampler": "a sampler that counts its passes: data hosts count epochs",
    "shards": "a stream: each virtual shard may end with a smaller batch, so there may be more batches",
    "shuffled": "a training loader without shuffle, or with an own sampler: stock shuffles it on several ranks",
    "RandomSampler replaced": "stock's DistributedSampler forgets num_samples of a RandomSampler, data hosts do not",
    "padding": "ranks that do not divide the samples: stock repeats some, data hosts share the last step",
    "drop_last": "ranks that do not divide the samples: stock pads first, data hosts drop what does not fill a step",
}

_REPLACED = {"torch's batch sampler": "batch sampler replaced", "RandomSampler of a part": "RandomSampler replaced"}


@dataclass
class Deviation:
    """A difference.

    Attributes:
        where: Run, stage and epoch.
        what: What differs.
        stock: By stock Lightning.
        ours: With data hosts.
        reason: Key of ``REASONS``; None: it has none.
    """

    where: str
    what: str
    stock: Any
    ours: Any
    reason: str | None = None


def deviations(number: int, stock: Sequence[Seen], ours: Sequence[Seen]) -> Iterator[Deviation]:
    """Yield what differs.

    Args:
        number: Number of the case.
        stock: What each rank saw by stock Lightning.
        ours: What each rank saw with data hosts.
    """
    script = case(number)
    yield from _failures(script, stock, ours)
    for key in sorted({key for seen in (*stock, *ours) for key in seen.batches}):
        if any(key.act in seen.errors for seen in (*stock, *ours)):
            continue
        old, new = ([_by_part(script, key, seen) for seen in ranks] for ranks in (stock, ours))
        for index, part in enumerate(script.loaders(key.act, key.stage).parts):
            place = Place(script, key, part, index)
            of_stock, of_ours = [parts[index] for parts in old], [parts[index] for parts in new]
            if script.world_size > 1 and place.is_split:
                yield from _Together(place).compare(of_stock, of_ours)
            else:
                for one_stock, one_ours in zip(of_stock, of_ours, strict=True):
                    yield from _Alone(place).compare(one_stock, one_ours)


def _failures(script: Case, stock: Sequence[Seen], ours: Sequence[Seen]) -> Iterator[Deviation]:
    for number, act in enumerate(script.acts):
        old = next((seen.errors[number] for seen in stock if number in seen.errors), None)
        new = next((seen.errors[number] for seen in ours if number in seen.errors), None)
        if (old is None) != (new is None):
            is_ours = new is not None
            reason = (
                _reason_of_our_refusal(script, number, str(new))
                if is_ours
                else _reason_of_refusal(script, number, str(old))
            )
            yield Deviation(f"{number} {act.method}", "one fails", old, new, reason)


def _reason_of_our_refusal(script: Case, number: int, error: str) -> str | None:
    train = script.loaders(_failed_act(script, number), "train")
    is_unsplit = script.world_size > 1 and not script.trainer.get("use_distributed_sampler", True)
    has_own = any(
        part.has(word) for part in train.parts for word in ("own", "torch's batch sampler", "counts its passes")
    )
    is_refused = "leaves the split over" in error and is_unsplit and has_own
    return "own sampler not split" if is_refused else None


def _failed_act(script: Case, number: int) -> int:
    """Return the call of a Trainer that failed: later calls of the same Trainer have its error."""
    while script.acts[number].trainer != "new":
        number -= 1
    return number


def _reason_of_refusal(script: Case, number: int, error: str) -> str | None:
    act = script.acts[_failed_act(script, number)]
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
    if any(loaders.has("torch's batch sampler") for loaders in used) and "overfit_batches" in script.trainer:
        return "batch sampler replaced"
    return None


def _by_part(script: Case, key: Pass, seen: Seen) -> list[list[Any]]:
    """The batches of each loader."""
    loaders = script.loaders(key.act, key.stage)
    parts: list[list[Any]] = [[] for _ in loaders.parts]
    for dataloader_idx, batch, *_ in seen.batches.get(key, []):
        if loaders.mode == "sequential" or loaders.shape == "one":
            parts[dataloader_idx].append(batch)
            continue
        (structure,) = batch.values()
        for index, one in enumerate(structure.values() if isinstance(structure, dict) else structure):
            if one is not None:
                parts[index].append(one)
    return parts


@dataclass
class Place:
    """One loader in one stage of a run.

    Attributes:
        script: The case.
        key: What its batches are for.
        part: The loader.
        index: Its number.
    """

    script: Case
    key: Pass
    part: Part
    index: int

    @property
    def loaders(self) -> Loaders:
        """The loader, and those beside it."""
        return self.script.loaders(self.key.act, self.key.stage)

    @property
    def act(self) -> Act:
        """The call of the Trainer."""
        return self.script.acts[self.key.act]

    @property
    def stage(self) -> str:
        """train, sanity, val, test or predict."""
        return self.key.stage

    @property
    def is_validation(self) -> bool:
        """Whether it is a validation, or the short one before the training."""
        return self.stage in ("val", "sanity")

    @property
    def has_several_passes(self) -> bool:
        """Whether there may be several validations in an epoch."""
        return self.is_fit and self.is_validation and "val_check_interval" in self.script.trainer

    @property
    def is_fit(self) -> bool:
        """Whether the Trainer fits."""
        return self.act.method == "fit"

    @property
    def is_overfit(self) -> bool:
        """Whether the order of the dataset replaces that of the sampler."""
        return self.is_fit and "overfit_batches" in self.script.trainer

    @property
    def is_shuffled_by_stock(self) -> bool:
        """Whether stock Lightning's DistributedSampler shuffles it, although neither loader nor sampler do."""
        keeps_order = self.part.is_ordered and not self.part.has("batch sampler") and not self.part.has("Distributed")
        return self.stage == "train" and self.script.world_size > 1 and keeps_order and not self.is_overfit

    @property
    def is_limited(self) -> bool:
        """Whether a pass may end before the loader does, or begin again."""
        limits = {f"limit_{self.stage}_batches", "overfit_batches" if self.is_fit else ""}
        is_together = len(self.loaders.parts) > 1 and self.loaders.mode != "sequential"
        return self.stage == "sanity" or bool(limits & {*self.script.trainer}) or is_together

    @property
    def drops_last(self) -> bool:
        """Whether a smaller last batch is left out."""
        return self.part.has("drop_last") and self.stage != "predict"

    @property
    def repeats_samples(self) -> bool:
        """Whether samples repeat: on ranks without one in the last step, or to pad the only step."""
        world_size = self.script.world_size
        num_full, num_left = divmod(self.part.size, (self.new_loader().batch_size or 1) * world_size)
        return 0 < num_left < world_size or (num_full == 0 and num_left % world_size > 0)

    @property
    def may_repeat(self) -> bool:
        """Whether a rank may repeat a sample or a batch of another."""
        is_whole = self.part.has("batch sampler") or self.part.has("batch_size=None")
        return not self.part.has("stream") and (is_whole or self.repeats_samples)

    @property
    def is_split(self) -> bool:
        """Whether each rank gets a part."""
        is_by_trainer = self.script.trainer.get("use_distributed_sampler", True)
        return is_by_trainer or any(map(self.part.has, ("stream", "DistributedSampler", "sampler with rank")))

    @property
    def reason_of_validations(self) -> str | None:
        """Why there are others in an epoch: it depends on the number of batches for training."""
        reasons = {"without length": "unsized", "stream": "shards"}
        train = self.script.loaders(self.key.act, "train")
        return next((reason for word, reason in reasons.items() if train.has(word)), None)

    def deviation(self, what: str, stock: Any, ours: Any, reason: str | None = None) -> Deviation:
        """Describe a difference."""
        where = f"{self.key.act} {self.act.method}, {self.stage} {self.key.epoch}, loader {self.index}"
        return Deviation(where, what, stock, ours, reason)

    @property
    def num_batches(self) -> int:
        """Batches in a pass of one rank."""
        loader = self.part.loader
        if self.drops_last or loader.batch_size is None:
            return len(self.local_pass())
        return -(-self.part.size // loader.batch_size)

    @property
    def num_passes(self) -> int:
        """Passes before this one that count: epochs since its loader was made, if its sampler counts."""
        every = self.script.trainer.get("reload_dataloaders_every_n_epochs", 0)
        age = self.key.epoch % every if every else self.key.epoch
        return age if self.part.has("counts its passes") else 0

    def new_loader(self, num_passes: int = 0) -> Any:
        """The loader itself, after a number of passes over its sampler."""
        loader: Any = case(self.script.number).loaders(self.key.act, self.stage).parts[self.index].loader
        for _ in range(num_passes):
            list(loader.batch_sampler or loader.sampler)
        return loader

    def local_pass(self, number: int = 0) -> list[Any]:
        """The batches of a local pass; of a sampler that counts, those that data hosts promise for this epoch.

        Args:
            number: Passes before it in the same epoch.
        """
        return [plain(batch) for batch in self.new_loader(self.num_passes + number)]


class _Alone:
    """Compares what one rank saw of a loader.

    Args:
        place: The loader.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def compare(self, stock: list[Any], ours: list[Any]) -> Iterator[Deviation]:
        """Yield what differs."""
        place, part = self._place, self._place.part
        if stock == ours:
            return
        if part.is_ordered or (place.is_overfit and not part.has("own") and not part.has("stream")):
            yield place.deviation("batches", stock, ours, self._reason(stock, ours))
        elif part.has("stream"):
            yield from self._streams(stock, ours)
        elif len(stock) != len(ours):
            yield place.deviation("number of batches", len(stock), len(ours), self._reason(stock, ours))
        elif part.has("own with random numbers"):
            yield from self._shuffled_batches(stock, ours)
        elif _shapes(stock) != _shapes(ours):
            yield place.deviation("shapes of batches", _shapes(stock), _shapes(ours))
        elif part.is_complete:
            yield from self._samples(stock, ours)
        elif not set(_leaves(ours)) <= set(_all_leaves(place)):
            yield place.deviation("samples", stock, ours)

    def _reason(self, stock: list[Any], ours: list[Any]) -> str | None:
        place, part = self._place, self._place.part
        whole = place.local_pass()
        if part.has("counts its passes") and (place.is_validation or place.stage == "train"):
            return "counting sampler" if self._counts_epochs(ours) else None
        has_whole_passes = not part.is_ordered or _is_repeated(ours, whole)
        if place.is_fit and place.is_validation and has_whole_passes:
            return place.reason_of_validations
        if part.has("torch's batch sampler") and (place.stage == "predict" or place.is_overfit):
            return "batch sampler replaced" if _has_all(ours, whole, place) else None
        return None

    def _counts_epochs(self, ours: list[Any]) -> bool:
        """Whether the first pass is that of its epoch, and a CombinedLoader that restarts the loader goes on."""
        place = self._place
        if place.is_validation and not place.is_limited:
            return _is_repeated(ours, place.local_pass())
        passes: list[Any] = []
        for number in range(len(ours)):
            passes += place.local_pass(number)
        if place.is_validation:  # there may be several
            return all(batch in passes for batch in ours)
        return ours == passes[: len(ours)]

    def _streams(self, stock: list[Any], ours: list[Any]) -> Iterator[Deviation]:
        place = self._place
        whole = _leaves(place.local_pass())
        if place.is_limited:
            is_right = _is_within(_leaves(ours), whole) or place.has_several_passes
            if not is_right or len(ours) < len(stock):
                yield place.deviation("samples", stock, ours)
            elif len(ours) > len(stock):
                yield place.deviation("number of batches", len(stock), len(ours), "shards")
        elif _leaves(ours) not in (whole, _leaves(stock)):
            reason = self._reason(stock, ours)
            is_repeated = reason == "shards" and not sum(_leaves(ours).values()) % sum(whole.values())
            yield place.deviation("samples", stock, ours, reason if is_repeated else None)
        elif len(ours) != len(stock):
            yield place.deviation("number of batches", len(stock), len(ours), "shards")

    def _shuffled_batches(self, stock: list[Any], ours: list[Any]) -> Iterator[Deviation]:
        place = self._place
        whole = place.local_pass()
        if any(batch not in whole for batch in ours):
            yield place.deviation("batches", stock, ours)
        elif place.is_overfit:
            yield place.deviation("batches", stock, ours, "overfit_batches")
        elif not place.is_limited:
            yield from self._samples(stock, ours)

    def _samples(self, stock: list[Any], ours: list[Any]) -> Iterator[Deviation]:
        """Compare the samples of a pass over a loader whose order is random."""
        place = self._place
        whole = _all_leaves(place)
        if place.has_several_passes and (place.is_limited or place.drops_last):
            is_right = set(_leaves(ours)) <= set(whole)
        elif place.has_several_passes:
            starts = range(0, len(ours), place.num_batches)
            is_right = all(_leaves(ours[start : start + place.num_batches]) == whole for start in starts)
        else:
            first = ours[: place.num_batches]  # CombinedLoader may begin again
            is_whole = len(first) == place.num_batches and not place.drops_last
            is_right = _leaves(first) == whole if is_whole else _is_within(_leaves(first), whole)
        if not is_right:
            yield place.deviation("samples", stock, ours)


class _Together:
    """Compares what all ranks together saw of a loader that is split over them.

    Args:
        place: The loader.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def compare(self, stock: list[list[Any]], ours: list[list[Any]]) -> Iterator[Deviation]:
        """Yield what differs."""
        place, part = self._place, self._place.part
        if len({len(batches) for batches in ours}) > 1:
            yield place.deviation("number of batches per rank", *([len(one) for one in each] for each in (stock, ours)))
            return
        old, new = _steps(stock), _steps(ours)
        if part.has("stream"):
            yield from self._streams(old, new)
        elif place.stage == "predict" and part.has("own") and part.has("batch sampler"):
            yield from self._predicted_batches(stock, ours)
        elif place.is_shuffled_by_stock:
            if not self._is_in_order(new):
                yield place.deviation("samples by step", stock, ours)
            elif old != new:
                yield place.deviation("samples by step", stock, ours, "shuffled")
        elif part.is_ordered or (place.is_overfit and not part.has("own")):
            if old != new:
                yield place.deviation("samples by step", stock, ours, self._reason(old, new))
        elif len(old) != len(new):
            yield place.deviation("number of steps", len(old), len(new), self._reason(old, new))
        elif not set(sum(new, Counter())) <= set(_all_leaves(place)):
            yield place.deviation("samples", stock, ours)
        elif part.is_complete and not place.is_limited and not place.drops_last:
            yield from self._samples(stock, ours)

    def _predicted_batches(self, stock: list[list[Any]], ours: list[list[Any]]) -> Iterator[Deviation]:
        place = self._place
        whole = place.local_pass()
        seen = [batch for batches in ours for batch in batches]
        is_right = all(batch in whole for batch in seen) and (place.is_limited or all(batch in seen for batch in whole))
        yield place.deviation("batches", stock, ours, "batch sampler not shared" if is_right else None)

    def _reason(self, old: list[Counter[str]], new: list[Counter[str]]) -> str | None:
        place, part = self._place, self._place.part
        if not set(sum(new, Counter())) <= set(_all_leaves(place)):
            return None
        is_uneven = part.size % place.script.world_size != 0
        if place.is_validation and part.has("counts its passes") and 0 <= len(old) - len(new) <= is_uneven:
            may_lack = place.is_limited or place.has_several_passes or place.drops_last
            is_right = may_lack or place.repeats_samples or sum(new, Counter()) == _all_leaves(place)
            return "counting sampler" if is_right else None
        if place.is_fit and place.is_validation and place.reason_of_validations is not None:
            return place.reason_of_validations
        replaced = next((reason for word, reason in _REPLACED.items() if part.has(word)), None)
        if replaced is not None:
            return replaced
        if not is_uneven or not 0 <= len(old) - len(new) <= 1:
            return None
        return "drop_last" if place.drops_last else self._padding(old, new)

    def _is_in_order(self, new: list[Counter[str]]) -> bool:
        """Whether the full steps have the order of the sampler."""
        place = self._place
        loader = place.new_loader(place.num_passes)
        whole = _leaves_of_samples(place)
        samples = [whole[index] for index in loader.sampler]
        per_step = (loader.batch_size or 1) * place.script.world_size
        full = [sum(samples[first : first + per_step], Counter()) for first in range(0, len(samples), per_step)]
        num_full = min(len(full), len(new)) - 1
        return new[:num_full] == full[:num_full] and set(sum(new, Counter())) <= set(_all_leaves(place))

    def _padding(self, old: list[Counter[str]], new: list[Counter[str]]) -> str | None:
        """Return the reason if samples that stock Lightning repeats are all that differs."""
        place, part = self._place, self._place.part
        total, whole = sum(new, Counter()), _all_leaves(place)
        # Batches that the user's code has made repeat as well.
        has_repeats = place.repeats_samples or part.has("batch_size=None")
        if place.has_several_passes:
            return "padding" if place.is_limited or set(total) == set(whole) else None
        is_right = _is_within(total, whole) if place.is_limited else total == whole
        if (part.is_complete or part.has("own sampler")) and not has_repeats and not is_right:
            return None
        same = min(len(old), len(new)) - 1
        if part.is_ordered and old[:same] != new[:same]:
            return None
        return "padding"

    def _samples(self, stock: list[list[Any]], ours: list[list[Any]]) -> Iterator[Deviation]:
        place = self._place
        total, whole = sum(_steps(ours), Counter()), _all_leaves(place)
        has_repeats = place.repeats_samples or place.part.has("own") or place.has_several_passes
        if total != whole and not (has_repeats and set(total) == set(whole)):
            yield place.deviation("samples", stock, ours)

    def _streams(self, old: list[Counter[str]], new: list[Counter[str]]) -> Iterator[Deviation]:
        place = self._place
        total, whole = sum(new, Counter()), _all_leaves(place)
        is_right = set(total) <= set(whole) if place.has_several_passes else _is_within(total, whole)
        if not is_right or (not place.is_limited and set(total) != set(whole)):
            yield place.deviation("samples", old, new)
        elif len(old) != len(new):
            yield place.deviation("number of steps", len(old), len(new), "shards")


def _steps(ranks: list[list[Any]]) -> list[Counter[str]]:
    """The values of each step, of all ranks together."""
    longest = max(map(len, ranks))
    return [sum((_leaves(batches[step : step + 1]) for batches in ranks), Counter()) for step in range(longest)]


def _all_leaves(place: Place) -> Counter[str]:
    """The values of all samples of a pass, those of an incomplete last batch included."""
    samples = _leaves_of_samples(place)
    if place.part.has("own sampler"):  # it may repeat some
        samples = [samples[index] for index in place.new_loader().sampler]
    return sum(samples, Counter())


def _leaves_of_samples(place: Place) -> list[Counter[str]]:
    loader = place.new_loader()
    if place.part.has("stream"):
        return [_leaves([plain(one)]) for one in loader]
    wrap = (lambda one: one) if place.part.has("batch_size=None") else (lambda one: [one])
    return [_leaves([plain(loader.collate_fn(wrap(loader.dataset[index])))]) for index in range(len(loader.dataset))]


def _is_repeated(batches: list[Any], once: list[Any]) -> bool:
    """Whether batches are those of one pass, several times."""
    if not once:
        return not batches
    times, rest = divmod(len(batches), len(once))
    return not rest and batches == once * times


def _has_all(batches: list[Any], whole: list[Any], place: Place) -> bool:
    return _is_within(_leaves(batches), _leaves(whole)) if place.is_limited else _leaves(batches) == _leaves(whole)


def _is_within(some: Counter[str], whole: Counter[str]) -> bool:
    return not some - whole


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list)


def _shapes(batches: list[Any]) -> list[Any]:
    """Everything but the values."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(part) for key, part in value.items()}
        if _is_array(value):
            return value[:2]
        return [shape(part) for part in value] if isinstance(value, list) else type(value).__name__

    return [shape(batch) for batch in batches]


def _leaves(batches: list[Any]) -> Counter[str]:
    """All values: the samples, whatever batches they are in."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            value = [part for name, part in value.items() if name != "count"]  # of samples in the batch
        elif _is_array(value):
            value = value[2]
        if not isinstance(value, list):
            yield value
            return
        for part in value:
            yield from leaves(part)

    return Counter(str(leaf) for batch in batches for leaf in leaves(batch))
