"""The limits of a run: their order, their cost and the threshold for naming them."""

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from lightning_sm.record.events import GpuUse, HostUse, Loader
from lightning_sm.record.thresholds import RankPace, slow_rank
from lightning_sm.record.totals import Totals
from lightning_sm.report.figures import HostSummary, TrainingRestart
from lightning_sm.report.limits import cause_of_wait, leading, limits
from lightning_sm.report.verdict import headline


@dataclass(frozen=True)
class Run:
    """The figures of a run that its limits need."""

    seconds: float
    pace: Totals
    spans: dict[str, list[float]]
    on_gpu: bool = False
    loaders: dict[int, Loader] = field(default_factory=dict)
    data: tuple[dict, list] = ({}, [])
    rank_paces: tuple[RankPace, ...] = ()
    world_size: int = 1
    hosts: tuple[HostSummary, ...] = ()
    restarts: tuple[TrainingRestart, ...] = ()
    repeated_s: float = 0.0
    shares: dict[str, float] = field(default_factory=lambda: {"shutdown": 1.0})
    fullest_memory: tuple[str, int, int] | None = None


# A job of 12 s with 100 steps of 100 ms.
PARTS = {"data_wait": 0.1, "to_device": 0.1, "forward": 3.7, "backward": 5.6, "optimizer": 0.4, "other": 0.1}
HEALTHY = Run(12.0, Totals(100, parts=PARTS), {"start-up": [1.5], "validation": [0.1] * 5})


def spending(seconds, **parts):
    """Return the healthy job with different seconds in some parts and spans."""
    spans = {name.replace("_", " "): [value] for name, value in parts.items() if name not in PARTS}
    own = {name: value for name, value in parts.items() if name in PARTS}
    return replace(HEALTHY, seconds=seconds, pace=Totals(100, parts=PARTS | own), spans={**HEALTHY.spans, **spans})


def paces(*own_s, wait_s=0.0):
    """Return ranks with steps of 1 s, given the seconds that each spends on its work."""
    return tuple(RankPace(f"rank {number} on algo-1", 100, 1.0, own, wait_s) for number, own in enumerate(own_s))


def names(times):
    """Return the names of a job's limits, the largest one first."""
    return [limit.name for limit in limits(times)]


def test_a_healthy_training_is_limited_by_its_own_work():
    """The largest part of a healthy job is named, but counts as work, not as waste."""
    assert names(HEALTHY) == ["the backward pass", "the forward pass"]
    assert headline(HEALTHY).startswith(
        "Limited by the backward pass, 47% of the job (5.6 s). It takes 56 ms of the 100 ms"
    )
    assert all(limit.is_work for limit in limits(HEALTHY))


@pytest.mark.parametrize(
    ("times", "name"),
    [
        (spending(20.0, data_wait=8.0), "waiting for data"),
        (spending(20.0, to_device=8.0), "the transfer to the device"),
        (spending(20.0, optimizer=8.0), "the optimizer"),
        (spending(20.0, other=8.0), "Python between the steps"),
        (replace(spending(20.0, other=8.0), on_gpu=True), "Python, for which the GPU idles"),
        (spending(20.0, checkpoints=8.0), "checkpoints"),
        (spending(20.0, validation=8.0), "validation"),
        (spending(20.0, first_step=8.0), "first step"),
        (spending(20.0, model_export=8.0), "model export"),
        (spending(20.0, between_epochs=8.0), "between epochs"),
        (replace(spending(50.0), spans={"start-up": [1.0, 38.0]}), "start-up"),
        (
            replace(spending(20.0), restarts=(TrainingRestart(0, 8, 8, 0),), shares={"restarts": 8.0, "shutdown": 1.0}),
            "restarts",
        ),
        (replace(spending(60.0), shares={"shutdown": 45.0}), "shutdown"),
        (replace(spending(20.0), rank_paces=paces(0.01, 0.08)), "a slow rank"),
    ],
)
def test_the_headline_names_the_largest_limit(times, name):
    """The headline names the largest avoidable limit and its seconds, before the training itself."""
    found = limits(times)
    first = leading(found, times.seconds)
    assert first.name == name
    assert headline(times).startswith(f"Limited by {name}, ")
    assert [limit.seconds for limit in found] == sorted((limit.seconds for limit in found), reverse=True)


def test_of_two_limits_the_larger_one_is_named():
    """A wait of 6% does not precede checkpoints of 50%; before, a sentence about data always came first."""
    times = spending(24.0, data_wait=1.5, checkpoints=12.0)
    assert headline(times).startswith("Limited by checkpoints, 50% of the job (12 s)")
    assert names(times) == ["checkpoints", "the backward pass", "the forward pass", "waiting for data"]


def test_a_small_waste_does_not_hide_what_training_itself_takes():
    """A validation that takes a tenth of the job is listed, but the backward pass remains the limit."""
    times = spending(13.5, validation=1.5)
    assert headline(times).startswith("Limited by the backward pass")
    assert "validation" in names(times)


@pytest.mark.parametrize("seconds", [0.59, 0.99])
def test_what_costs_little_is_not_shown(seconds):
    """Limits below 5% of the job or below 1 s are left out."""
    assert "validation" not in names(spending(12.0, validation=seconds))


def test_a_usual_start_is_no_limit():
    """A start that takes as long as importing Python, torch and Lightning usually does is not a limit."""
    assert names(replace(HEALTHY, seconds=36.0, spans={"start-up": [25.0]})) == [
        "the backward pass",
        "the forward pass",
    ]


def test_a_few_steps_have_no_verdict():
    """Below 50 steps, means are not meaningful, so no limit is named."""
    times = replace(HEALTHY, pace=Totals(49, parts=PARTS))
    assert limits(times) == []
    assert headline(times) == "49 steps: too few for a verdict, which needs 50."
    assert headline(replace(HEALTHY, pace=Totals())) == "No training step is recorded."


def test_the_cause_of_a_wait_is_part_of_its_name():
    """The headline names the cause of the wait, and a plan's advice replaces the general advice."""
    run = replace(spending(20.0, data_wait=8.0), loaders={0: Loader(0.0, workers=2)})
    assert headline(run).startswith(
        "Limited by waiting for data (transforms), 40% of the job (8 s). Training waits 45% of"
    )
    assert limits(run)[0].change == "Increase the DataLoader's num_workers if the host has idle CPUs."
    assert limits(run, "Send less.")[0].change == "Send less."


def test_full_memory_is_said_although_it_costs_no_second_yet():
    """Full memory comes last and makes the headline only if nothing else limits the job."""
    times = replace(HEALTHY, fullest_memory=("algo-1", 98 * 10**9, 100 * 10**9))
    assert names(times)[-1] == "memory near its limit"
    assert limits(times)[-1].finding.startswith("algo-1 had 98 GB of 100 GB in use")
    assert "memory near its limit" not in names(replace(times, fullest_memory=("algo-1", 90 * 10**9, 100 * 10**9)))


def test_a_gpu_on_which_nothing_ran_is_named():
    """An idle GPU costs money but no time, so it comes last; GPUs of data hosts or in use at times do not count."""
    uses = tuple(
        HostUse(t, 0.5, 2 * 10**9, 16 * 10**9, gpus=[GpuUse(use, 10**9, 16 * 10**9) for use in (0.3, 0.0, 0.0, 0.0)])
        for t in range(3)
    )
    trainer = HostSummary("algo-1", "trainer", "trainer", None, 4, 4, uses)
    found = limits(replace(HEALTHY, hosts=(trainer,)))[-1]
    assert (found.name, found.seconds) == ("an idle GPU", 0.0)
    assert found.finding == "Nothing ran on 3 of the 4 GPUs of algo-1."
    busy = tuple(msgspec.structs.replace(use, gpus=use.gpus[:1]) for use in uses)
    for host in (replace(trainer, uses=busy), replace(trainer, role="data"), replace(trainer, uses=())):
        assert "an idle GPU" not in names(replace(HEALTHY, hosts=(host,)))


@pytest.mark.parametrize("rank", [{"forward": 8.7, "backward": 0.6}, {"forward": 0.3, "backward": 9.0}])
def test_the_time_that_a_slow_rank_costs_is_counted_once(rank):
    """The slow rank's extra time counts neither as its forward pass nor as the backward pass of the waiting ranks."""
    times = replace(HEALTHY, pace=Totals(100, parts=PARTS | rank), rank_paces=paces(0.01, 0.09))
    found = {limit.name: limit.seconds for limit in limits(times)}
    assert found["a slow rank"] == pytest.approx(8.0)
    assert found.get("the forward pass", 0.0) + found.get("the backward pass", 0.0) < 2.0


def test_a_rank_is_slow_if_others_wait_for_it():
    """A rank is slow if it takes twice as long as the others, and a considerable part of the step."""
    found = slow_rank(paces(0.1, 0.9, 0.1, 0.1))
    assert found.extra_s == pytest.approx(0.8)
    assert found.text.startswith("Rank 1 on algo-1 holds up the others: apart from the backward pass")
    assert "takes 900 ms a step, compared with 100 ms on the others" in found.text


@pytest.mark.parametrize(
    "ranks",
    [[], paces(0.9), paces(0.5, 0.9), paces(0.01, 0.03), paces(0.1, 0.9, wait_s=0.5)],
    ids=["none", "alone", "not twice", "a trifle", "may have waited for their data"],
)
def test_other_ranks_are_not_slow(ranks):
    """A rank is not slow if there is none to compare it with, little to gain, or another explanation."""
    assert slow_rank(ranks) is None


@pytest.mark.parametrize(
    ("workers", "name", "words"),
    [
        (0, "the training process builds its own batches", "builds its batches itself."),
        (4, "transforms", "for the transforms: the workers of the loader (4 for each rank) are too slow."),
    ],
)
def test_a_local_loader_is_told_what_is_too_slow(workers, name, words):
    """The advice for a slow local loader is to add workers, whether it has some or none."""
    loaders = {0: Loader(0.0, workers=workers)}
    cause = cause_of_wait(replace(spending(20.0, data_wait=8.0), loaders=loaders))
    assert cause.name == name
    assert words in cause.text
    assert "num_workers" in cause.change
    assert cause_of_wait(replace(HEALTHY, loaders=loaders)) is None
