"""Two ranks see the same batches whether or not one of their data hosts is killed."""

import json
import os
import subprocess
import sys

import pytest

from lightning_sm import DataHost
from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.integration.scripts.train_ranks import NUM_TEST, NUM_TRAIN
from tests.quick_processes import python_path

# tests/integration/data/test_same_as_stock.py shows that ranks see the same batches without data hosts.
pytestmark = [pytest.mark.processes, pytest.mark.proof]

STAGES = {"train 0": NUM_TRAIN, "train 1": NUM_TRAIN, "val 0": NUM_TEST, "val 1": NUM_TEST, "test 2": NUM_TEST}
TIMEOUT_S = 180


def run(folder, *hosts, **variables):
    """Train on hosts, and return what each rank saw."""
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1", "SEEN": str(folder)}
    env |= {"ADDRESSES": " ".join(host.address for host in hosts), **variables}
    command = [sys.executable, str(SCRIPTS / "train_ranks.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def test_a_data_host_that_is_killed_is_not_missed(tmp_path):
    """After SIGKILL in the first epoch, the ranks see the same batches, bit for bit, and every sample."""
    deadly = tmp_path / "killed"
    with DataHost(workers=1) as first, DataHost(workers=1) as second:
        whole = run(tmp_path / "whole", first, second)
        ranks = run(tmp_path / "seen", first, second, DEADLY=str(deadly))
    assert deadly.exists()
    assert len(ranks) == 2
    assert ranks == whole
    for stage, num_samples in STAGES.items():
        assert {index for rank in ranks for batch in rank[stage] for index, _ in batch} == set(range(num_samples))
