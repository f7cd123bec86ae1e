"""strategy=pipeline with layers that users typically have: as in one process, or refused on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.training.strategies.pipeline_runs import Fit
from tests.integration.training.strategies.test_pipeline import TOLERANCE, Seen, difference, ranks_of

pytestmark = [pytest.mark.processes, pytest.mark.proof]

MODELS = ("lstm", "channels_last", "unet", "vit", "lengths", "counters")
ONE = {f"one {model}": Fit(model=model) for model in MODELS}
TIED = {"max_steps": 3, "max_epochs": -1}
TIED_ON = {"max_steps": 6, "max_epochs": -1}
TWO = {
    "tied": Fit({}, "tied", {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
    "tied until 3": Fit({}, "tied, adamw", TIED),
    "meta": Fit({}, "meta"),
    **{model: Fit({}, model) for model in MODELS},
    "outputs": Fit({}, "outputs"),
    "outputs, all": Fit({"outputs": "all"}, "outputs"),
    "own logger": Fit({}, "own logger", {"logger": True}, refused=True),
    "logger in validation": Fit({}, "logger in validation", {"logger": True}, refused=True),
    "own logger, all": Fit({"outputs": "all"}, "own logger", {"logger": True}),
    "dropouts": Fit({"split": [2]}, "dropouts", {"max_steps": 1}),
    "draws": Fit({"split": [3]}, "draws"),
    "draws, resumed": Fit({"split": [3]}, "draws", resume="draws at 4"),
    "draws, all": Fit({"split": [3], "outputs": "all"}, "draws", {"max_epochs": 1}),
    "raw lstm": Fit({"split": [1]}, "raw lstm", refused=True),
    "norms": Fit({}, "norms", {"gradient_clip_val": 0.1}),
    "lbfgs": Fit({}, "lbfgs", refused=True),
    "time first": Fit({}, "time first", refused=True),
    "skip": Fit({}, "skip", refused=True),
    "stops": Fit({}, "stops"),
    "fast_dev_run": Fit({}, "stops", {"fast_dev_run": 5}),
    "draw": Fit({}, "draw"),
    "draw again": Fit({}, "draw again", refused=True),
    "change": Fit({}, "change"),
    "trim": Fit({}, "trim"),
    "twice": Fit({}, "twice", refused=True),
    "averaged": Fit({}, "averaged", {"max_steps": 1}, refused=True),
    "raw lstm in validation": Fit({"split": [1]}, "raw lstm in validation", {"max_epochs": 1}, refused=True),
}

FOUR = {
    "tied, replicas": Fit(
        {"pipeline_parallel_size": 2}, "tied", {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    ),
    "tied until 6": Fit({"pipeline_parallel_size": 4}, "tied, adamw", TIED_ON, resume="tied until 3"),
    "meta, replicas": Fit({"pipeline_parallel_size": 2}, "meta"),
}
AFTER = {
    "one outputs": Fit(model="outputs"),
    "one norms": Fit(model="norms", trainer={"gradient_clip_val": 0.1}),
    "one stops": Fit(model="stops"),
    "one draw": Fit(model="draw"),
    "one change": Fit(model="change"),
    "one tied": Fit(model="tied", trainer={"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
    "one tied until 3": Fit(model="tied, adamw", trainer=TIED),
    "one tied until 6": Fit(model="tied, adamw", trainer=TIED_ON, resume="tied until 3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results and checkpoints."""
    return tmp_path_factory.mktemp("layers")


@pytest.fixture(scope="module")
def fits(folder: Path) -> Seen:
    """Results of all fits."""
    return ranks_of(folder, {2: TWO, 4: FOUR, 1: {**ONE, **AFTER}})


@pytest.mark.parametrize("name", MODELS)
def test_layers_as_users_have_them_train_as_in_one_process(fits: Seen, name: str):
    """Tensors may be non-contiguous, forward or backward, and batches may have any lengths."""
    (alone,) = fits[f"one {TWO[name].model}"]
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


def test_other_lengths_cost_no_extra_pass(fits: Seen):
    """The first layer runs 4 times in each of 12 steps, and 4 times to compare rows."""
    assert fits["lengths"][0]["extra"]["passes"] == 12 * 4 + 4


def test_what_a_step_counts_is_counted_once(fits: Seen):
    """Code before the network's call runs on every rank, code after it on the last; buffers are updated on all."""
    (alone,) = fits["one counters"]
    for seen in fits["counters"]:
        for name in ("rows", "batches", "counted behind"):
            expected = 0 if name == "counted behind" and seen is fits["counters"][0] else alone["extra"][name]
            assert seen["extra"][name] == expected
        assert difference({"mean": seen["extra"]["mean"]}, {"mean": alone["extra"]["mean"]}, "mean") <= TOLERANCE


@pytest.mark.parametrize(("name", "holders"), [("outputs", [False, True]), ("outputs, all", [True, True])])
def test_only_the_last_stage_has_whole_outputs_unless_all_ask_for_them(fits: Seen, name: str, holders: list[bool]):
    """Other ranks have no tensor of that shape; losses, logged values and metrics match one process on every rank."""
    (alone,) = fits["one outputs"]
    for seen, is_holder in zip(fits[name], holders, strict=True):
        assert (seen["extra"]["whole outputs"] > 0) is is_holder
        assert seen["extra"]["returned"] == (["largest", "logits", "loss"] if is_holder else ["largest", "loss"])
        for key in ("losses", "metrics"):
            assert difference(seen, alone, key) <= TOLERANCE
        assert difference(seen["extra"], alone["extra"], "largest") <= TOLERANCE
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


def test_a_logger_that_only_the_last_stage_would_use_is_an_error_on_every_rank(fits: Seen):
    """Such a logger would write nothing, so every rank raises an error; with outputs on all ranks, rank 0 writes."""
    for seen in fits["own logger"]:
        assert "training_step uses self.logger.log_metrics" in seen["error"]
        assert "outputs: all" in seen["error"]
    for seen in fits["logger in validation"]:
        assert "validation_step uses self.logger.log_metrics" in seen["error"]
    assert [seen["step"] for seen in fits["own logger, all"]] == [12, 12]


def test_inputs_of_other_shapes_train_as_before(fits: Seen):
    """A step may pass the network other shapes for batches of the same shape."""
    assert [seen["step"] for seen in fits["trim"]] == [12, 12]


@pytest.mark.parametrize("name", ["draw", "change"])
def test_a_step_may_draw_from_any_generator_and_change_its_batch(fits: Seen, name: str):
    """It runs once, so it may draw from NumPy before the network's call, and change its labels in place."""
    (alone,) = fits[f"one {name}"]
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE


def test_stages_drop_different_features(fits: Seen):
    """Each stage draws from its own stream of random numbers."""
    first, second = (seen["extra"]["masks"] for seen in fits["dropouts"])
    assert len(first) == len(second) == 4
    assert not any(mask in second for mask in first)


@pytest.mark.parametrize("name", ["draws", "draws, resumed", "draws, all"])
def test_hooks_draw_the_same_numbers_on_all_ranks(fits: Seen, name: str):
    """Hooks draw the same numbers even after the fetching rank, stages with dropout or the last rank have drawn."""
    first, second = (seen["extra"]["draws"] for seen in fits[name])
    assert len(set(first.values())) == len(first) > 20  # an epoch draws more than 20 times
    assert len(set(second.values())) == len(second)
    assert {where.partition(",")[0] for where in first} >= {"on_train_epoch_start", "validation_step"}
    assert {where.partition(",")[0] for where in second} >= {"training_step", "validation_step"}
    assert first == {where: numbers for where, numbers in second.items() if where in first}


def test_a_resumed_pipeline_draws_as_one_without_an_interruption(fits: Seen):
    """A resumed pipeline draws the same numbers in hooks and in stages, whose dropout affects losses and weights."""
    for whole, resumed in zip(fits["draws"], fits["draws, resumed"], strict=True):
        expected, found = whole["extra"]["draws"], dict(resumed["extra"]["draws"])
        repeated = found.pop("on_train_epoch_start, epoch 0, step 4, batch -1")
        assert repeated == expected["on_train_epoch_start, epoch 0, step 0, batch -1"]
        assert found == {where: expected[where] for where in found}
        assert resumed["losses"] == whole["losses"][4:]
    whole, resumed = fits["draws"][0]["weights"], fits["draws, resumed"][0]["weights"]
    assert all(torch.equal(resumed[weight], whole[weight]) for weight in whole)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raw lstm", "network.0, the last layer of its stage, returns a tuple of Tensor, tuple"),
        ("lbfgs", "LBFGS needs the gradients of all parameters"),
        ("time first", "depends on other rows of its batch"),
        ("skip", "returned NoneType without a loss"),
        ("draw again", "passes other inputs to self.network(...) on this rank than on the first one"),
        ("twice", "calls the network several times"),
        ("averaged", "The state of _Average has other tensors on this rank"),
        ("raw lstm in validation", "network.0, the last layer of its stage, returns a tuple of Tensor, tuple"),
    ],
)
def test_what_one_rank_refuses_is_an_error_on_every_rank(fits: Seen, name: str, message: str):
    """Every rank raises the error within the step, even in mid-training, so no rank waits for a timeout."""
    for seen in fits[name]:
        assert message in seen["error"]


@pytest.mark.parametrize("name", ["stops", "fast_dev_run"])
def test_a_step_ends_the_fit_on_all_ranks(fits: Seen, name: str):
    """Only the rank of the last stage runs the step to the end, and the others would wait for it in the next."""
    (alone,) = fits["one stops"]
    assert len(alone["losses"]) == 3
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE


@pytest.mark.parametrize("name", ["tied", "tied, replicas"])
def test_tied_weights_train_as_in_one_process(fits: Seen, name: str):
    """With clipping, accumulation and decay, tied weights sum their gradients, count once, and share a group."""
    (alone,) = fits["one tied"]
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE
    assert list(fits[name][0]["weights"]) == list(alone["weights"])
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


def test_a_checkpoint_has_tied_weights_once(fits: Seen, folder: Path):
    """Tied weights have both names and one optimizer state, as in one process; four stages resume from them."""
    ours, theirs = (
        torch.load(folder / name, weights_only=False) for name in ("tied until 3.ckpt", "one tied until 3.ckpt")
    )
    weights = ours["state_dict"]
    assert weights["network.0.weight"].data_ptr() == weights["network.9.weight"].data_ptr()
    (state,), (expected,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert state["state"].keys() == expected["state"].keys()
    assert [group["params"] for group in state["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]
    assert difference(fits["tied until 6"][0], fits["one tied until 6"][0], "weights") <= TOLERANCE


def test_hooks_see_the_norm_over_all_stages(fits: Seen):
    """Hooks on every rank see the norm over all stages, for any p-norm."""
    (alone,) = fits["one norms"]
    for seen in fits["norms"]:
        assert difference(seen["extra"], alone["extra"], "norms") <= 10 * TOLERANCE  # the 1-norm is about 10


@pytest.mark.parametrize("name", ["meta", "meta, replicas"])
def test_layers_on_the_meta_device_are_made_on_their_own_stage(fits: Seen, name: str):
    """Each rank holds only its stage, initialized unlike the other stage; replicas start equal and train."""
    first, second = (fits[name][rank]["extra"] for rank in (0, 1))
    weights = fits[name][0]["weights"]
    assert first["held"] + second["held"] == sum(weight.numel() for weight in weights.values())
    assert min(first["held"], second["held"]) > 0
    assert not set(first["initial"]) & set(second["initial"])
    assert all(weight.isfinite().all() for weight in weights.values())
    for rank in range(2, len(fits[name])):
        assert fits[name][rank]["extra"] == fits[name][rank % 2]["extra"]
