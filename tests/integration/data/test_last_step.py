"""The last step, in which ranks have different numbers of samples: what ordinary scripts do there works."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from lightning_sm import DataHost
from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.integration.scripts.train_uneven import BATCH_SIZE
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

TIMEOUT_S = 300


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.proof)])
def ranks(request, tmp_path_factory):
    """What each of some ranks saw."""
    folder = tmp_path_factory.mktemp("seen")
    variables = {"PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1", "SEEN": str(folder)}
    variables["RANKS"] = str(request.param)
    with DataHost(workers=2) as host:
        # The host sets the secret that the ranks need.
        env = {**os.environ, **variables, "ADDRESSES": host.address}
        command = [sys.executable, str(SCRIPTS / "train_uneven.py")]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def numbers(ranks):
    """The samples of a pass."""
    return [float(number) for number in range(1, 2 + (2 * BATCH_SIZE + 1) * len(ranks))]


def steps_of(ranks, stage):
    """The batches of all ranks, ``[step][rank]``, in the first epoch and in the second."""
    steps = list(zip(*(rank["seen"][stage] for rank in ranks), strict=True))
    return steps[: len(steps) // 2], steps[len(steps) // 2 :]


def flat(steps):
    """All samples, step by step and rank by rank."""
    return [sample for step in steps for batch in step for sample in batch]


def test_each_rank_has_equally_many_samples_where_the_code_gathers(ranks):
    """Training gathers from its first step on: in both epochs, samples fill the last step, and a line says so."""
    for epoch in steps_of(ranks, "train"):
        assert [{len(batch) for batch in step} for step in epoch] == [{4}, {4}, {2}]
        assert set(flat(epoch)) == set(numbers(ranks))
        assert len(flat(epoch)) == len(numbers(ranks)) + len(ranks) - 1
    lines = [line for line in ranks[0]["lines"] if "samples repeat" in line]
    assert [line.partition(":")[0] for line in lines] == ["train_dataloader()", "test_dataloader()"]
    assert f"so that all {len(ranks)} ranks have equally many" in lines[0]
    assert "the code of this stage gathers tensors" in lines[0]
    assert not any("samples repeat" in line for rank in ranks[1:] for line in rank["lines"])


def test_a_gather_of_torch_is_noticed_as_well(ranks):
    """``torch.distributed.all_gather`` in a test step, which is Lightning's own only in name."""
    steps = [step for epoch in steps_of(ranks, "test") for step in epoch]
    assert [{len(batch) for batch in step} for step in steps] == [{4}, {4}, {2}]


def test_each_sample_is_validated_once_where_the_code_does_not_gather(ranks):
    """The last step is split, from the first pass on: nothing repeats."""
    for epoch in steps_of(ranks, "val 1"):
        assert flat(epoch) == numbers(ranks)
        assert [len(batch) for batch in epoch[-1]] == [2] + [1] * (len(ranks) - 1)


def test_volumes_of_different_sizes_come_one_by_one(ranks):
    """No batch has more than the one sample that the loader asks for; in the last step, all ranks have the same one."""
    for epoch in steps_of(ranks, "val 0"):
        assert {len(batch) for step in epoch for batch in step} == {1}
        assert flat(epoch) == [*range(2 * len(ranks) + 1), *[2 * len(ranks)] * (len(ranks) - 1)]


@pytest.mark.parametrize("loader", [0, 1])
def test_logged_values_are_those_of_one_rank(ranks, loader):
    """At the end of the epoch and in each step, for each reduction, on all ranks; the repeated volume counts once."""
    samples = [float(index) for index in range(2 * len(ranks) + 1)] if loader == 0 else numbers(ranks)
    in_step = len(ranks) * (BATCH_SIZE if loader else 1)
    functions = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}
    own = f"/dataloader_idx_{loader}"
    for rank in ranks:
        metrics = {name.removesuffix(own): value for name, value in rank["metrics"].items() if name.endswith(own)}
        assert metrics["acc"] == 1.0
        for name, function in functions.items():
            expected = function(torch.tensor(samples)).item()
            assert metrics[f"{name}_epoch"] == pytest.approx(expected, rel=1e-6)
        logged = [step for step in rank["steps"] if any(name.endswith(own) for name in step)]
        for step, start in zip(logged, itertools.cycle(range(0, len(samples), in_step)), strict=False):
            part = torch.tensor(samples[start : start + in_step])
            expected = {f"{name}_step{own}": function(part).item() for name, function in functions.items()}
            assert step == pytest.approx(expected, rel=1e-6)
        assert len(logged) == 6


def test_a_late_gather_of_different_shapes_is_an_error_on_all_ranks(ranks):
    """What ranks gather at the end of the first epoch has different sizes: a message instead of SIGABRT."""
    sizes = [2 * BATCH_SIZE + 2, 2 * BATCH_SIZE + 1]
    for rank in ranks:
        text = f"all_gather got tensors of different shapes: ({sizes[0]},) from rank 0 of its group, but ({sizes[1]},)"
        assert rank["error"].startswith(text)
        assert "Set data_service.tail=pad" in rank["error"]
