"""What differs between the batches of stock Lightning and those of data hosts, and which differences are documented.

A documented difference is believed only where the batches are those that the documentation promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.differential.cases import Act, Case, Loaders, Part, case
from tests.differential.deviation import Deviation
from tests.differential.failures import failures
from tests.differential.fits import Pass, Seen, plain

_REPLACED = {"torch's batch sampler": "batch sampler replaced", "RandomSampler of a part": "RandomSampler replaced"}


def deviations(number: int, stock: Sequence[Seen], ours: Sequence[Seen]) -> Iterator[Deviation]:
    """Yield what differs.

    Args:
        number: Number of the case.
        stock: What each rank saw by stock Lightning.
        ours: What each rank saw with data hosts.
    """
    script = case(number)
    yield from failures(script, stock, ours)
    stock, moved = _at_epochs_of(script, stock, ours)
    yield from moved
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


def _at_epochs_of(script: Case, stock: Sequence[Seen], ours: Sequence[Seen]) -> tuple[list[Seen], list[Deviation]]:
    """Return what stock Lightning evaluates as of the epochs of ours, and where these differ."""
    epochs = {key[:2]: key.epoch for seen in ours for key in seen.batches if script.acts[key.act].method != "fit"}
    moved: dict[tuple[int, str], Deviation] = {}
    at_epochs = []
    for seen in stock:
        batches = {key._replace(epoch=epochs.get(key[:2], key.epoch)): own for key, own in seen.batches.items()}
        at_epochs.append(Seen(batches, seen.errors))
        for key in seen.batches.keys() - batches.keys():
            fit = next(number for number in range(key.act, -1, -1) if script.acts[number].trainer == "new")
            # Stock Lightning runs epochs without a batch if it does not know that there is none.
            is_empty = not any(
                own.act == fit and own.stage == "train" for rank in (*stock, *ours) for own in rank.batches
            )
            is_unsized = is_empty and script.loaders(fit, "train").has("without length")
            where, new = f"{key.act} {script.acts[key.act].method}", epochs[key[:2]]
            moved[key[:2]] = Deviation(where, "epoch", key.epoch, new, "unsized" if is_unsized else None)
    return at_epochs, [*moved.values()]


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
    def keeps_split(self) -> bool:
        """Whether stock Lightning replaces a sampler that splits the data by one that does not."""
        is_by_trainer = self.script.trainer.get("use_distributed_sampler", True)
        return self.is_overfit and not is_by_trainer and self.part.has("DistributedSampler")

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
        if self.has_several_passes and self.script.world_size > 1:
            reasons |= _REPLACED
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
            yield from self._whole_batches(stock, ours)
        elif part.has("torch's batch sampler") and old != new:
            yield from self._batches_of_torch(stock, ours)
        elif place.keeps_split:
            # Stock Lightning takes the order of the dataset, on each rank.
            is_right = set(sum(new, Counter())) <= set(_all_leaves(place)) and all(one == stock[0] for one in stock)
            yield place.deviation("samples by step", stock, ours, "DistributedSampler kept" if is_right else None)
        else:
            yield from self._by_step(stock, ours)

    def _by_step(self, stock: list[list[Any]], ours: list[list[Any]]) -> Iterator[Deviation]:
        place, part = self._place, self._place.part
        old, new = _steps(stock), _steps(ours)
        if place.is_shuffled_by_stock:
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

    def _batches_of_torch(self, stock: list[list[Any]], ours: list[list[Any]]) -> Iterator[Deviation]:
        """Compare batches of a BatchSampler: they are whole, but for those of the last step."""
        place = self._place
        whole, total = place.local_pass(), sum(_steps(ours), Counter())
        tail = sum((_leaves([batch]) for batch in whole[-place.script.world_size :]), Counter())
        seen = [batch for batches in ours for batch in batches]
        are_batches = all(batch in whole or set(_leaves([batch])) <= set(tail) for batch in seen)
        is_limited = place.is_limited or place.has_several_passes
        is_right = set(total) <= set(_all_leaves(place)) if is_limited else set(total) == set(_all_leaves(place))
        yield place.deviation("batches", stock, ours, "batch sampler replaced" if are_batches and is_right else None)

    def _whole_batches(self, stock: list[list[Any]], ours: list[list[Any]]) -> Iterator[Deviation]:
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
        if part.has("RandomSampler of a part"):
            num_steps = -(-part.size // ((part.loader.batch_size or 1) * place.script.world_size))
            is_right = num_steps - place.drops_last <= len(new) <= num_steps
            return "RandomSampler replaced" if is_right or place.is_limited or place.has_several_passes else None
        return self._reason_if_uneven(old, new) if is_uneven else None

    def _reason_if_uneven(self, old: list[Counter[str]], new: list[Counter[str]]) -> str | None:
        place = self._place
        if place.part.has("DistributedSampler that drops") and len(new) == len(old) + 1:
            has_all = sum(new, Counter()) == _all_leaves(place) or place.repeats_samples
            return "DistributedSampler drops" if has_all and not place.is_limited else None
        if not 0 <= len(old) - len(new) <= 1:
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
