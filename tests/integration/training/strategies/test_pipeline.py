"""strategy=pipeline trains like one process, however the network is spread over ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.reserved_job import reserve_job
from tests.integration.hosts import run_together
from tests.integration.training.strategies.pipeline_runs import ROWS, Fit, command

pytestmark = pytest.mark.processes

# float32 on Gloo: losses and metrics are summed in another order than in one process.
TOLERANCE = 1e-6
TIMEOUT_S = 400.0

# In float32, the ResNet amplifies rounding errors tenfold in two steps.
DOUBLE = {"precision": "64-true", "max_steps": 5}
SHORT = {"max_steps": 3}
CLIPPED = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}

Seen = Mapping[str, list[dict[str, Any]]]


def ranks_of(folder: Path, fits: Mapping[int, Mapping[str, Fit]]) -> Seen:
    """Run fits in new processes, by number of processes, and return what each rank of each fit saw."""
    groups = []
    with ExitStack() as stack:
        for world_size, some in fits.items():
            # Reserve the port: the kernel could give a free one to another process before rank 0 listens.
            _, topology, ports = reserve_job({"group": ["algo-1"]})
            stack.enter_context(ports)
            groups.append((world_size, topology.main_port, some))
        (ended,) = run_together({"ranks": (command(folder, groups), os.environ)}, timeout_s=TIMEOUT_S).values()
    assert ended.code == 0, ended.output
    return {
        name: [torch.load(folder / f"{name}.{rank}") for rank in range(world_size)]
        for world_size, some in fits.items()
        for name in some
    }


# Two epochs of four steps.
short = partial(Fit, rows=4 * ROWS)
ALONE = {
    "one": short(),
    "one-clipped": short(trainer={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "one-odd": Fit(rows=4 * ROWS + 6),
    "one-until-3": short(trainer={"max_steps": 3, "max_epochs": -1}),
    "one-until-6": short(trainer={"max_steps": 6, "max_epochs": -1}, resume="one-until-3"),
    "one-until-8": short(trainer={"max_steps": 8, "max_epochs": -1}, resume="one-until-6"),
    "until 8": short(trainer={"max_steps": 8, "max_epochs": -1}, resume="until 6"),
    "one-transformer": short(model="transformer"),
    "one-vit": short(model="vit"),
    "one-tied": short(model="tied", trainer=CLIPPED),
}
# All fits in the same four processes, because starting processes takes longer than a fit.
FOUR = {
    "pipeline 4": short({"pipeline_parallel_size": 4}),
    "cluster": short({"pipeline_parallel_size": 2}),
    "spread": short({"pipeline_parallel_size": 2, "placement": "spread"}),
    "clipped": short({"pipeline_parallel_size": 2}, trainer={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "odd, all outputs": Fit({"pipeline_parallel_size": 4, "outputs": "all"}, rows=4 * ROWS + 6),
    "until 3": short({"pipeline_parallel_size": 2}, trainer={"max_steps": 3, "max_epochs": -1}),
    "until 3, again": short({"pipeline_parallel_size": 2}, trainer={"max_steps": 3, "max_epochs": -1}),
    "until 6": short({"pipeline_parallel_size": 4}, trainer={"max_steps": 6, "max_epochs": -1}, resume="until 3"),
    "transformer": short({"pipeline_parallel_size": 4}, model="transformer"),
    "vit": short({"pipeline_parallel_size": 4}, model="vit"),
    "tied": short({"pipeline_parallel_size": 2}, "tied", CLIPPED),
}
# The fit of one process that each pipeline must match.
SAME = {
    "pipeline 4": "one",
    "cluster": "one",
    "spread": "one",
    "clipped": "one-clipped",
    "odd, all outputs": "one-odd",
    "until 3": "one-until-3",
    "until 6": "one-until-6",
    "transformer": "one-transformer",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results and checkpoints."""
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def fits(folder: Path) -> Seen:
    """Results of all fits: by four processes, and by one, which resumes from a checkpoint of four."""
    return ranks_of(folder, {4: FOUR, 1: ALONE})


def difference(seen: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float:
    """Return the largest difference between the numbers that two ranks saw under a name."""
    a, b = seen[key], other[key]
    if isinstance(a, torch.Tensor):
        return float((a - b).abs().max())
    pairs = zip(a, b, strict=True) if isinstance(a, list) else ((a[name], b[name]) for name in a)
    return max(float((torch.as_tensor(x) - torch.as_tensor(y)).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("name", SAME)
def test_a_pipeline_trains_as_one_process_does(fits: Seen, name: str):
    """Losses, logged values and metrics on every rank, and the weights of rank 0, match one process."""
    (alone,) = fits[SAME[name]]
    for seen in fits[name]:
        assert seen["step"] == alone["step"]
        assert difference(seen, alone, "losses") <= TOLERANCE
        assert seen["metrics"].keys() == alone["metrics"].keys()
        synchronized = {key: value for key, value in seen["metrics"].items() if key != "train_loss_step"}
        assert difference({"metrics": synchronized}, alone, "metrics") <= TOLERANCE
    assert list(fits[name][0]["weights"]) == list(alone["weights"])
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


@pytest.mark.parametrize("name", ["vit", "tied"])
def test_layers_as_users_have_them_train_as_in_one_process(fits: Seen, name: str):
    """Attention and weights shared by two ranks train as in one process; test_pipeline_layers.py has other layers."""
    (alone,) = fits[f"one-{name}"]
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


@pytest.mark.parametrize("name", ["pipeline 4", "cluster", "spread", "odd, all outputs"])
def test_a_pipeline_evaluates_as_one_process_does(fits: Seen, name: str):
    """Evaluation matches one process, with outputs on the last stage or everywhere, and numbers on all ranks."""
    (alone,) = fits[SAME[name]]
    assert alone["extra"]["val_outputs"] == ["logits", "loss"]
    assert alone["extra"]["val_rows"][-3:] == [10, 10, 2]
    with_outputs = 0
    for seen in fits[name]:
        assert difference(seen, alone, "tested") <= TOLERANCE
        if seen["extra"]["tested"] is None:
            assert seen["extra"]["val_outputs"] == ["loss"]
        else:
            with_outputs += 1
            assert seen["extra"]["val_rows"] == alone["extra"]["val_rows"]
            assert difference(seen["extra"], alone["extra"], "tested") <= TOLERANCE
            assert seen["extra"]["val_outputs"] == ["logits", "loss"]
    assert with_outputs == {"pipeline 4": 1, "cluster": 2, "spread": 2, "odd, all outputs": 4}[name]


@pytest.mark.parametrize("name", ["pipeline 4", "cluster", "spread"])
def test_every_rank_predicts_what_one_process_does(fits: Seen, name: str):
    """Predictions match on all ranks and stages, even with rows that no number of microbatches divides."""
    (alone,) = fits["one"]
    for seen in fits[name]:
        assert difference(seen, alone, "predictions") <= TOLERANCE


def test_a_pipeline_is_deterministic(fits: Seen):
    """Repeating a fit gives the same losses and weights, bit by bit."""
    for seen, again in zip(fits["until 3"], fits["until 3, again"], strict=True):
        assert seen["losses"] == again["losses"]
        assert all(torch.equal(seen["weights"][name], again["weights"][name]) for name in seen["weights"])


def test_a_checkpoint_is_that_of_one_process(fits: Seen, folder: Path):
    """A checkpoint of two stages, resumed by four and then one, has the structure of one written by one process."""
    theirs = torch.load(folder / "one-until-6.ckpt", weights_only=False)
    ours = torch.load(folder / "until 6.ckpt", weights_only=False)
    assert ours.keys() == theirs.keys()
    assert _shapes(ours["optimizer_states"]) == _shapes(theirs["optimizer_states"])
    assert _shapes(ours["state_dict"]) == _shapes(theirs["state_dict"])
    assert difference(fits["until 8"][0], fits["one-until-8"][0], "weights") <= TOLERANCE


# By the number of processes.
OTHERS = {
    2: {
        "two": Fit({}),
        "uneven": Fit({"split": [2]}),
        "resnet": Fit({}, "resnet", DOUBLE),
        "resnet in float32": Fit({}, "resnet", SHORT, rows=10 * ROWS),
        "float64": Fit({}, trainer={"precision": "64-true"}),
        "bf16-mixed": Fit({}, trainer={"precision": "bf16-mixed"}),
        "AdamW": Fit({}, "adamw"),
    },
    4: {
        "hybrid resnet": Fit({"pipeline_parallel_size": 2}, "resnet", DOUBLE),
        "resnet 4": Fit({"pipeline_parallel_size": 4}, "resnet", DOUBLE),
        "spread resnet": Fit({"pipeline_parallel_size": 2, "placement": "spread"}, "resnet", DOUBLE),
    },
}
# All other fits use TOLERANCE.
TOLERANCES = {
    **dict.fromkeys(("resnet", "hybrid resnet", "spread resnet", "resnet 4", "float64"), 1e-12),
    "bf16-mixed": 5e-3,
    # The gradient of the attention keys' bias is rounding noise around 0, which AdamW turns into steps of size lr.
    "AdamW": 2e-2,
}


@pytest.mark.proof
def test_other_models_and_numbers_train_as_one_process_does(tmp_path: Path):
    """ResNet-18 with group normalization, double and mixed precision, and AdamW train as in one process."""
    plain: dict[str, Fit] = {}
    for fit in (replace(fit, strategy=None) for fits_of in OTHERS.values() for fit in fits_of.values()):
        if fit not in plain.values():
            plain[f"one {len(plain)}"] = fit
    seen = ranks_of(tmp_path, {1: plain, **OTHERS})
    for name, fit in (pair for fits_of in OTHERS.values() for pair in fits_of.items()):
        (same,) = (one for one, other in plain.items() if replace(fit, strategy=None) == other)
        for key in ("losses", "weights"):
            assert difference(seen[name][0], seen[same][0], key) <= TOLERANCES.get(name, TOLERANCE), (name, key)


# A backend that accepts only what NCCL accepts: tests/gpu/staged.py.
STRICT = {"process_group_backend": "staged"}
AS_FOR_NCCL = {
    "hybrid": Fit({"pipeline_parallel_size": 2, **STRICT}, trainer={"gradient_clip_val": 0.1}),
    "two": Fit({"pipeline_parallel_size": 2, **STRICT}),
    "all outputs": Fit({"pipeline_parallel_size": 4, "outputs": "all", **STRICT}),
    "odd rows": Fit({"pipeline_parallel_size": 4, **STRICT}, rows=4 * ROWS + 6),
    "transformer": Fit({"pipeline_parallel_size": 4, **STRICT}, model="transformer"),
}


@pytest.mark.proof
def test_ranks_make_only_calls_that_nccl_takes(tmp_path: Path):
    """Tensors are contiguous, and all ranks make the same collective calls, with equal sizes, in the same order."""
    plain = {f"one {name}": replace(fit, strategy=None) for name, fit in AS_FOR_NCCL.items()}
    seen = ranks_of(tmp_path, {1: plain, 4: AS_FOR_NCCL})
    for name in AS_FOR_NCCL:
        for key in ("losses", "weights"):
            assert difference(seen[name][0], seen[f"one {name}"][0], key) <= TOLERANCE, (name, key)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return {key: _shapes(item) for key, item in value.items()}
    return [_shapes(item) for item in value] if isinstance(value, (list, tuple)) else type(value)
