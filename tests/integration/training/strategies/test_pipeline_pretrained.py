"""strategy=pipeline with models of transformers as they are: the training of one process, or an error on all ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.emulators import job_dir, local
from tests.integration.hosts import REPOSITORY
from tests.integration.training.strategies.pipeline_runs import Fit
from tests.integration.training.strategies.pretrained_models import MISUSES
from tests.integration.training.strategies.test_pipeline import TOLERANCE, Seen, difference, ranks_of

pytestmark = [pytest.mark.processes, pytest.mark.proof, pytest.mark.usefixtures("transformers_path")]

UNTIL_3 = {"max_steps": 3, "max_epochs": -1}
UNTIL_6 = {"max_steps": 6, "max_epochs": -1}
MODELS = (
    "gpt2",
    "gpt2, recomputed",
    "gpt2, classes",
    "llama",
    "llama, tied, eager",
    "bert",
    "bert, masked",
    "vit, classes",
    "starcoder2",
)
ALONE = {
    **{f"one {model}": Fit(model=model) for model in MODELS},
    "one gpt2, until 3": Fit(model="gpt2", trainer=UNTIL_3),
    "one gpt2, until 6": Fit(model="gpt2", trainer=UNTIL_6, resume="one gpt2, until 3"),
}
TWO = {
    **{model: Fit({}, model) for model in MODELS},
    "gpt2, interleaved": Fit({"schedule": "interleaved"}, "gpt2"),
    "gpt2, split backward": Fit({"schedule": "zbv"}, "gpt2"),
    "gpt2, head apart": Fit({"split": ["lm_head"]}, "gpt2"),
    "gpt2, embedding apart": Fit({"split": ["transformer.h.0"], "outputs": "all"}, "gpt2"),
    "llama, split backward": Fit({"schedule": "zbv"}, "llama, tied, eager"),
    "llama, recomputed": Fit({"activation_checkpointing": 2}, "llama"),
    "bert, interleaved": Fit({"schedule": "interleaved"}, "bert"),
    "vit, interleaved": Fit({"schedule": "interleaved"}, "vit, classes"),
    "vit, split backward": Fit({"schedule": "zbv"}, "vit, classes"),
    "vit, rows that do not divide": Fit({"num_microbatches": 3}, "vit, classes"),
}
DDP = {"gpt2, DDP": Fit(model="gpt2"), "llama, DDP": Fit(model="llama")}
OTHERS = {
    "gpt2, resumed from one": Fit({}, "gpt2", trainer=UNTIL_6, resume="one gpt2, until 3"),
    "gpt2, until 3": Fit({}, "gpt2", trainer=UNTIL_3),
    "dropout": Fit({}, "gpt2, dropout"),
    "dropout, recomputed": Fit({}, "gpt2, dropout, recomputed"),
    **{how: Fit({}, how, refused=True) for how in MISUSES},
    "undeclared": Fit({}, "undeclared starcoder2", refused=True),
}
FOUR = {
    "gpt2, replicas": Fit({"pipeline_parallel_size": 2}, "gpt2"),
    "llama, shards": Fit({"pipeline_parallel_size": 2, "shard": True}, "llama"),
    "four stages": Fit({"pipeline_parallel_size": 4}, "llama, tied, eager"),
}
SAME = {
    **{name: f"one {fit.model}" for name, fit in TWO.items()},
    "gpt2, resumed from one": "one gpt2, until 6",
    "one, resumed from gpt2": "one gpt2, until 6",
    "dropout, recomputed": "dropout",
    "gpt2, replicas": "gpt2, DDP",
    "llama, shards": "llama, DDP",
    "four stages": "one llama, tied, eager",
}


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """All fits."""
    folder = tmp_path_factory.mktemp("pretrained")
    seen = {
        **ranks_of(folder, 1, ALONE),
        **ranks_of(folder, 2, {**TWO, **DDP, **OTHERS}),
        **ranks_of(folder, 4, FOUR),
    }
    after = {"one, resumed from gpt2": Fit(model="gpt2", trainer=UNTIL_6, resume="gpt2, until 3")}
    return {**seen, **ranks_of(folder, 1, after)}


@pytest.mark.parametrize("name", SAME)
def test_a_model_of_transformers_trains_as_in_one_process(fits: Seen, name: str):
    """Losses, weights and metrics of validation agree; so do the weights' names, and checkpoints resume either way."""
    expected = fits[SAME[name]][0]
    for seen in fits[name]:
        assert difference(seen, expected, "losses") <= TOLERANCE
        assert difference(seen, expected, "metrics") <= TOLERANCE
    assert list(fits[name][0]["weights"]) == list(expected["weights"])
    assert difference(fits[name][0], expected, "weights") <= TOLERANCE


def test_dropout_is_active_in_all_stages(fits: Seen):
    """The same model without dropout has other losses from the first step on."""
    assert fits["dropout"][0]["losses"][0] != fits["gpt2"][0]["losses"][0]


def test_shards_hold_half_of_the_parameters(fits: Seen):
    """Each of two replicas has its part of every stage."""
    held = [one["held"]["parameters"] for one in fits["llama, shards"]]
    whole = sum(torch.as_tensor(value).numel() for value in fits["llama, DDP"][0]["weights"].values())
    assert sum(held) == whole


REASONS = {
    "embeds": "with inputs_embeds: a pipeline cannot honour it, because the embedding is a layer",
    "other names": "with input_ids, token_type_ids, but with input_ids, attention_mask for an earlier batch",
    "base model": "not on this rank",
    "twice": "calls the network several times",
    "own loss": "adds the rows up: set loss: sum",
    "hidden states": "with output_hidden_states: a pipeline cannot honour it",
    "attentions": "with output_attentions: a pipeline cannot honour it",
    "cache": "with use_cache: a pipeline cannot honour it, because stages keep no keys and values",
    "tuple": "with past_key_values: a pipeline cannot honour it, because stages keep no keys and values",
    "undeclared": 'self.model.pipeline_parts = {"embedding": ["model.embed_tokens"], "blocks": "model.layers"}',
}


@pytest.mark.parametrize("name", REASONS)
def test_what_stages_do_not_have_is_refused_on_every_rank(fits: Seen, name: str):
    """The error has the reason, and the line to write where there is one."""
    for seen in fits[name]:
        assert REASONS[name] in seen["error"]


SCRIPT = REPOSITORY / "tests/integration/scripts/train_gpt2.py"
LOADED = """
import runpy, sys, torch
script = runpy.run_path(sys.argv[1], run_name="loaded")
model = script["LanguageModel"]()
model.load_state_dict(torch.load(sys.argv[2]))
model.eval()
losses = [float(model.model(**batch).loss) for batch in script["Text"]().val_dataloader()]
print("loss", sum(losses) / len(losses))
"""


def test_a_job_trains_a_model_of_transformers_and_exports_it_whole(tmp_path: Path):
    """The script knows no pipeline; its export has the names of one process, and the loss that the job has logged."""
    arguments = ["--trainer.strategy=pipeline", "--trainer.max_epochs=2"]
    job = local(tmp_path, tmp_path, "--group", "trainer=2", "--", str(SCRIPT), "fit", *arguments, timeout_s=400)
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"\| 1 +1 \(algo-\d\) +model\.transformer\.h\.2 to lm_head +7,232\n", job.stdout)
    logged = float(re.search(r"\| finished: .* val_loss=([\d.]+)", job.stdout)[1])  # type: ignore[index]
    (weights,) = job_dir(tmp_path).glob("algo-*/model/state_dict.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOADED, str(SCRIPT), str(weights)]
    alone = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert alone.returncode == 0, alone.stderr
    assert float(alone.stdout.split()[-1]) == pytest.approx(logged, rel=1e-4)
