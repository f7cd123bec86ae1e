"""strategy=pipeline with any loss trains as one process does; what a pipeline cannot do is refused on all ranks."""

from __future__ import annotations

import pytest

from tests.integration.training.strategies.pipeline_runs import Fit
from tests.integration.training.strategies.test_pipeline import TOLERANCE, Seen, difference, ranks_of

pytestmark = pytest.mark.processes

MODELS = ("padded", "sum", "class weights", "denoising", "contrastive", "flipped")
REFUSED = ("weight decay", "detached", "fails forward", "fails backward")
ONE = {f"one {model}": Fit(model=model) for model in MODELS}
TWO = {
    **{model: Fit({}, model) for model in MODELS},
    "contrastive, all outputs": Fit({"outputs": "all"}, "contrastive"),
    "sum, DDP": Fit(model="sum"),
    "padded, DDP": Fit(model="padded"),
    "contrastive, DDP": Fit(model="contrastive"),
    **{model: Fit({}, model, refused=True) for model in REFUSED},
}
FOUR = {f"{model}, replicas": Fit({"pipeline_parallel_size": 2}, model) for model in ("sum", "padded", "contrastive")}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Results of all fits."""
    return ranks_of(tmp_path_factory.mktemp("losses"), {1: ONE, 2: TWO, 4: FOUR})


@pytest.mark.parametrize("name", [*MODELS, "contrastive, all outputs"])
def test_any_loss_trains_as_in_one_process(fits: Seen, name: str):
    """A loss may average over anything, compare rows, draw random numbers, or count steps."""
    (alone,) = fits[f"one {name.partition(',')[0]}"]
    for seen in fits[name]:
        assert difference(seen, alone, "losses") <= TOLERANCE
    assert difference(fits[name][0], alone, "weights") <= TOLERANCE
    assert fits[name][-1]["extra"] == alone["extra"]


@pytest.mark.parametrize("kind", ["sum", "padded", "contrastive"])
def test_replicas_count_as_with_ddp(fits: Seen, kind: str):
    """As with DDP, losses are averaged over replicas, whatever each replica's loss sums or averages over."""
    ours, ddp = fits[f"{kind}, replicas"][0], fits[f"{kind}, DDP"][0]
    for key in ("losses", "weights"):
        assert difference(ours, ddp, key) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weight decay", "WeightDecay.training_step uses the parameters network."),
        ("detached", "Detached.training_step does not depend on the network's output"),
        ("fails forward", "in a forward pass"),
        ("fails backward", "in a backward pass"),
    ],
)
def test_what_one_rank_cannot_do_is_an_error_on_every_rank(fits: Seen, name: str, message: str):
    """Every rank raises the error within the step, or its backward pass, so no rank waits for a timeout."""
    for seen in fits[name]:
        assert message in seen["error"]
        assert seen["seconds"] < 60
