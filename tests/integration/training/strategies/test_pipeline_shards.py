"""strategy=pipeline with shards inside the pipeline: as one process, in less memory, with the same checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.training.strategies.pipeline_runs import Fit
from tests.integration.training.strategies.test_pipeline import TOLERANCE, Seen, difference, ranks_of

pytestmark = [pytest.mark.processes, pytest.mark.proof]

SHARDED = {"pipeline_parallel_size": 2, "shard": True}
SPLIT = {**SHARDED, "tensor_parallel_size": 2}
CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
UNTIL_3, UNTIL_6 = {"max_steps": 3, "max_epochs": -1}, {"max_steps": 6, "max_epochs": -1}
ONE = {
    "one": Fit(),
    "one clipped": Fit(trainer=CLIPPED),
    "one tied": Fit(model="tied", trainer=CLIPPED),
    "one transformer": Fit(model="transformer"),
    "one transformer clipped": Fit(model="transformer", trainer={"gradient_clip_val": 0.1}),
    "one transformer until 3": Fit(model="transformer", trainer=UNTIL_3),
    "one transformer until 6": Fit(model="transformer", trainer=UNTIL_6, resume="one transformer until 3"),
    "one inference": Fit(model="inference"),
    "one until 3": Fit(trainer=UNTIL_3),
    "one until 6": Fit(trainer=UNTIL_6, resume="one until 3"),
}
FOUR = {
    "sharded": Fit(SHARDED),
    "spread": Fit({**SHARDED, "placement": "spread"}),
    "interleaved": Fit({**SHARDED, "schedule": "interleaved", "chunks": 2}),
    "clipped": Fit(SHARDED, trainer=CLIPPED),
    "tied": Fit(SHARDED, "tied", CLIPPED),
    "recomputed": Fit({**SHARDED, "activation_checkpointing": True}),
    "inference": Fit(SHARDED, "inference"),
    "hook": Fit(SHARDED, "transformer"),
    "AdamW": Fit(SHARDED, "adamw", {"max_steps": 2}),
    "replicated AdamW": Fit({"pipeline_parallel_size": 2}, "adamw", {"max_steps": 2}),
    "split": Fit(SPLIT, "transformer", {"gradient_clip_val": 0.1}),
    "split until 3": Fit(SPLIT, "transformer", UNTIL_3),
    "split until 6": Fit(SPLIT, "transformer", UNTIL_6, resume="split until 3"),
    "unsplit until 6": Fit(SHARDED, "transformer", UNTIL_6, resume="split until 3"),
    "split without a hook": Fit(SPLIT, refused=True),
    "until 3": Fit(SHARDED, trainer=UNTIL_3),
    "from one": Fit(SHARDED, trainer=UNTIL_6, resume="one until 3"),
    "until 6": Fit(SHARDED, trainer=UNTIL_6, resume="until 3"),
    "replicated until 6": Fit({"pipeline_parallel_size": 2}, trainer=UNTIL_6, resume="until 3"),
}
AFTER = {"alone until 6": Fit(trainer=UNTIL_6, resume="until 3")}
SAME = {
    "sharded": "one",
    "spread": "one",
    "interleaved": "one",
    "recomputed": "one",
    "clipped": "one clipped",
    "tied": "one tied",
    "hook": "one transformer",
    "inference": "one inference",
    "split": "one transformer clipped",
    "until 3": "one until 3",
    "from one": "one until 6",
    "until 6": "one until 6",
    "replicated until 6": "one until 6",
    "alone until 6": "one until 6",
}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """All fits, of which some resume from others."""
    folder: Path = tmp_path_factory.mktemp("shards")
    one, four = ranks_of(folder, 1, ONE), ranks_of(folder, 4, FOUR)
    return {**one, **four, **ranks_of(folder, 1, AFTER)}


@pytest.mark.parametrize("name", SAME)
def test_a_sharded_pipeline_trains_as_one_process_does(fits: Seen, name: str):
    """Losses on every rank and weights, also from checkpoints of and for other shapes."""
    (alone,) = fits[SAME[name]]
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE
    assert list(fits[name][0]["weights"]) == list(alone["weights"])
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


@pytest.mark.parametrize("name", ["split until 6", "unsplit until 6"])
def test_split_layers_are_whole_in_checkpoints(fits: Seen, name: str):
    """A run with or without split layers goes on from one with them, as one process from its own."""
    (alone,) = fits["one transformer until 6"]
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


def test_layers_that_nothing_can_split_are_refused(fits: Seen):
    """On every rank, with what the hook must do."""
    for seen in fits["split without a hook"]:
        assert "has no method shard_stage(layers, mesh)" in seen["error"]


def test_validation_in_inference_mode_leaves_training_alone(fits: Seen):
    """It sees the weights of one process before, between and after steps, which go on."""
    (alone,) = fits["one inference"]
    for seen in fits["inference"]:
        assert difference(seen["extra"], alone["extra"], "means") <= TOLERANCE


@pytest.mark.parametrize("name", ["sharded", "interleaved"])
def test_a_sharded_pipeline_predicts_what_one_process_does(fits: Seen, name: str):
    """Forward passes without gradients gather the shards, too."""
    (alone,) = fits["one"]
    for seen in fits[name]:
        assert difference(seen, alone, "predictions") <= TOLERANCE


def test_each_rank_holds_its_share(fits: Seen):
    """Of parameters and of the optimizer's states: half of those of a replicated pipeline, but for uneven rows."""
    for sharded, replicated in zip(fits["AdamW"], fits["replicated AdamW"], strict=True):
        for kind in ("parameters", "states"):
            share = sharded["held"][kind] / replicated["held"][kind]
            assert 0.45 < share < 0.55


def test_data_pipeline_and_tensor_in_one_mesh(tmp_path: Path):
    """Two of each, in both placements, and from a checkpoint: the weights are those of one process."""
    clipped = {"gradient_clip_val": 0.1}
    alone = ranks_of(tmp_path, 1, {name: fit for name, fit in ONE.items() if "transformer" in name})
    fits = ranks_of(
        tmp_path,
        8,
        {
            "cluster": Fit(SPLIT, "transformer", clipped),
            "spread": Fit({**SPLIT, "placement": "spread"}, "transformer", clipped),
            "until 3": Fit(SPLIT, "transformer", UNTIL_3),
            "until 6": Fit(SPLIT, "transformer", UNTIL_6, resume="until 3"),
        },
    )
    same = {"cluster": "transformer clipped", "spread": "transformer clipped", "until 6": "transformer until 6"}
    for name, other in same.items():
        assert difference(fits[name][0], alone[f"one {other}"][0], "weights") <= TOLERANCE
