"""strategy=pipeline with losses that are not a mean over equal rows: as in one process, or refused on all ranks."""

from __future__ import annotations

import pytest

from tests.integration.training.strategies.pipeline_runs import Fit
from tests.integration.training.strategies.test_pipeline import TOLERANCE, Seen, difference, ranks_of

pytestmark = pytest.mark.processes

MODELS = ("padded", "sum", "class weights", "denoising")
ONE = {f"one {model}": Fit(model=model) for model in (*MODELS, "contrastive")}
TWO = {
    "padded": Fit({}, "padded"),
    "sum": Fit({}, "sum"),
    "class weights": Fit({}, "class weights"),
    "denoising": Fit({}, "denoising"),
    "sum, DDP": Fit(model="sum"),
    "padded, DDP": Fit(model="padded"),
    "undeclared padding": Fit({}, "padded", refused=True),
    "undeclared sum": Fit({}, "sum", refused=True),
    "contrastive": Fit({}, "contrastive", refused=True),
    "contrastive in one microbatch": Fit({"num_microbatches": 1}, "contrastive"),
}
FOUR = {
    "sum, replicas": Fit({"pipeline_parallel_size": 2}, "sum"),
    "padded, replicas": Fit({"pipeline_parallel_size": 2}, "padded"),
    "replicas, undeclared padding": Fit({"pipeline_parallel_size": 2}, "padded", refused=True),
}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Results of all fits."""
    return ranks_of(tmp_path_factory.mktemp("losses"), {1: ONE, 2: TWO, 4: FOUR})


@pytest.mark.parametrize(
    ("name", "model"), [*((model, model) for model in MODELS), ("contrastive in one microbatch", "contrastive")]
)
def test_a_declared_loss_trains_as_one_process_does(fits: Seen, name: str, model: str):
    """Losses and weights match one process, even if all labels of a microbatch are padding, or the step adds noise."""
    (alone,) = fits[f"one {model}"]
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE


@pytest.mark.parametrize("kind", ["sum", "padded"])
def test_replicas_count_as_with_ddp(fits: Seen, kind: str):
    """As with DDP, losses are averaged over replicas, whatever each replica's loss sums or averages over."""
    ours, ddp = fits[f"{kind}, replicas"][0], fits[f"{kind}, DDP"][0]
    for key in ("losses", "weights"):
        assert difference(ours, ddp, key) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("undeclared padding", ["weighted by rows", "pipeline_weight(self, batch)"]),
        ("undeclared sum", ["adds up the rows, set the strategy's option loss: sum"]),
        ("contrastive", ["compares the rows of a batch", "num_microbatches=1"]),
        ("replicas, undeclared padding", ["weighted by rows", "pipeline_weight(self, batch)"]),
    ],
)
def test_a_loss_that_is_not_declared_is_refused_on_every_rank(fits: Seen, name: str, messages: list[str]):
    """All stages and replicas raise the same error, which has both numbers and names the missing declaration."""
    errors = [seen["error"] for seen in fits[name]]
    assert len(set(errors)) == 1
    for message in messages:
        assert message in errors[0]
