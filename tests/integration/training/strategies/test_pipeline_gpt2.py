"""strategy=pipeline trains a GPT-2 of transformers, with tied weights and padded rows, like one process."""

from __future__ import annotations

import pytest

from tests.integration.training.strategies.pipeline_runs import Fit
from tests.integration.training.strategies.test_pipeline import TOLERANCE, difference, ranks_of

pytestmark = [pytest.mark.processes, pytest.mark.proof, pytest.mark.usefixtures("transformers_path")]


def test_a_gpt2_of_transformers_trains_as_in_one_process(tmp_path):
    """Two stages, two replicas of two, and four stages match one process, whose loss is transformers' own."""
    two = {"two": Fit({}, "gpt2"), "data": Fit(model="gpt2")}
    four = {"replicas": Fit({"pipeline_parallel_size": 2}, "gpt2"), "four": Fit({"pipeline_parallel_size": 4}, "gpt2")}
    fits = ranks_of(tmp_path, {1: {"one": Fit(model="gpt2")}, 2: two, 4: four})
    (alone,) = fits["one"]
    assert alone["losses"][0] == pytest.approx(alone["extra"]["loss of transformers"][0], rel=1e-6)
    for name, expected in (("two", alone), ("four", alone), ("replicas", fits["data"][0])):
        for seen in fits[name]:
            assert difference(seen, expected, "losses") <= TOLERANCE, name
        assert difference(fits[name][0], expected, "weights") <= TOLERANCE, name
