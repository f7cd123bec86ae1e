"""strategy=smddp on a stand-in for SageMaker's library, which refuses what the library does not support."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.integration.emulators import job_dir, local
from tests.integration.hosts import REPOSITORY, SCRIPTS, TIMEOUT_S, Hosts, script
from tests.integration.rank_launchers import NEEDS_MPIRUN, mpirun
from tests.integration.scripts.train_and_reduce import Model, Points
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

# Samples: MANY take several seconds, because an interruption is noticed only within 1 s; FEW are enough to train.
MANY, FEW = 1000, 100
STAND_IN = REPOSITORY / "tests/fakes/smdistributed_stand_in"
LIBRARY = {"PYTHONPATH": python_path(REPOSITORY, STAND_IN)}


def train(folder, strategy, num_samples, *options):
    """Train on two hosts that support SMDDP and a data host; return what each rank saw, and the log."""
    groups = ["--group", "trainer=2:ml.p4d.24xlarge", "--group", "data=1:ml.c5.xlarge"]
    arguments = [
        "--data.num_samples",
        str(num_samples),
        "--trainer.limit_val_batches",
        "2",
        "--trainer.strategy",
        strategy,
    ]
    ended = local(
        folder,
        folder,
        *groups,
        *options,
        "--",
        str(SCRIPTS / "train_and_reduce.py"),
        *arguments,
        timeout_s=180,
        **LIBRARY,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seen = [json.loads(path.read_text()) for path in job_dir(folder).glob("algo-*/output/seen-*.json")]
    return sorted(seen, key=lambda rank: rank["rank"]), ended.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Results of each rank of a job with strategy=smddp."""
    ranks, _ = train(tmp_path_factory.mktemp("smddp"), "smddp", FEW)
    return ranks


def test_a_run_on_smddp_ends_with_the_weights_of_one_process(seen):
    """A job with prepare_data, a data host and metrics of every kind ends with the weights of one process."""
    assert [(rank["strategy"], rank["backend"], rank["step"]) for rank in seen] == [
        ("SMDDPStrategy", "smddp", FEW // 2)
    ] * 2
    model = Model()
    optimizer = model.configure_optimizers()
    dataset = Points(FEW).train_dataloader().dataset
    samplers = [DistributedSampler(dataset, 2, rank) for rank in range(2)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        indices = torch.tensor([list(sampler) for sampler in samplers])
        for step in indices.split(2, dim=1):
            optimizer.zero_grad()
            model.loss(dataset[step.flatten()]).backward()
            optimizer.step()
    for rank in seen:
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(torch.tensor(rank["weights"][name]), weight, rtol=0, atol=1e-6)


def test_ranks_reduce_as_with_any_backend(seen):
    """Means, maxima, minima and decisions are correct, although SMDDP supports only sums."""
    for rank in seen:
        reduced = {name: rank["metrics"][name] for name in ("mean", "max", "min")}
        assert reduced == {"mean": 1.5, "max": 2.0, "min": 1.0}
        assert (rank["all"], rank["any"]) == (False, True)


@pytest.mark.proof
def test_an_interrupted_run_ends_with_the_weights_of_ddp_bit_by_bit(tmp_path):
    """An interrupted SMDDP job matches DDP, even in metrics and decisions, because Gloo sums for both strategies."""
    (tmp_path / "smddp").mkdir()
    (tmp_path / "ddp").mkdir()
    interrupted, output = train(tmp_path / "smddp", "smddp", MANY, "--fault", "interrupt@step=5")
    assert "Interrupted: step" in output
    assert "Attempt 2 of 2" in output
    uninterrupted, _ = train(tmp_path / "ddp", "ddp", MANY)
    assert [(rank["strategy"], rank["backend"], rank["step"]) for rank in uninterrupted] == [
        ("DDPStrategy", "gloo", MANY // 2)
    ] * 2
    strategy = {"strategy": "SMDDPStrategy", "backend": "smddp"}
    assert [{**rank, **strategy} for rank in uninterrupted] == interrupted


@pytest.mark.proof
@pytest.mark.mpi
@NEEDS_MPIRUN
def test_the_ranks_may_come_from_mpirun():
    """Ranks may be started by mpirun, as in AWS's images, which use mpirun for this library."""
    with tempfile.TemporaryDirectory(prefix="smddp") as folder:
        hosts = Hosts(Path(folder), {"trainer": ["algo-2", "algo-1"]}, instance_types={"trainer": "ml.p4d.24xlarge"})
        end = mpirun(
            hosts, hosts.names, script("train_and_reduce.py", "fit", "--trainer.strategy=smddp"), python_path=[STAND_IN]
        )
        assert end.code == 0, end.output
        seen = hosts.seen()
    assert [(rank["rank"], rank["backend"], rank["step"]) for rank in seen] == [(0, "smddp", 12), (1, "smddp", 12)]
    assert [rank["metrics"]["max"] for rank in seen] == [2.0, 2.0]


@pytest.mark.proof
@pytest.mark.parametrize(("what", "refused"), [("prepare", "new_group()"), ("log", "ReduceOp.AVG")])
def test_lightnings_own_ddp_does_what_smddp_refuses(what, refused):
    """The stand-in reproduces both faults of Lightning issue 20409, so code that passes on it avoids them."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPTS / "stock_ddp_on_smddp.py"), what],
        env={**os.environ, **LIBRARY},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 1
    assert f"UnsupportedBySMDDPError: smddp does not support: {refused}" in ended.stderr
