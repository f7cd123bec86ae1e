"""Data hosts run what rank 0 has: scripts as people write them train on the same batches in a job as on a laptop."""

import json
import os
import subprocess
import sys

import pytest

from tests.integration.hosts import REPOSITORY, SCRIPTS, TIMEOUT_S
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

SCRIPT = str(SCRIPTS / "train_many_ways.py")
BY_A_GLOBAL = str(SCRIPTS / "train_by_a_global.py")
WAYS = (
    *("new DataModules", "attributes between fits", "two classes", "levels", "epochs", "guarded setup"),
    *("classes of the script", "from_datasets", "bare loaders", "own loaders", "both", "switched off", "resumed"),
    *("epochs of the model", "by the CLI", "after a DataModule"),
)


def ran(folder, *command, timeout_s=3 * TIMEOUT_S):
    """Run Python with some arguments in a folder, and return how it ended."""
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=env,
        cwd=folder,
    )


def run(folder, *prefix):
    """Run the script, and return what each rank has trained on."""
    ended = ran(folder, *prefix, SCRIPT, str(folder))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*.json"))]


def job(folder, num_trainers):
    """Run the script in a job with two data hosts."""
    groups = ["--group", f"trainer={num_trainers}", "--group", "data=2", "--base-dir", str(folder / "hosts")]
    return run(folder, "-m", "lightning_sm", "local", *groups, "--")


@pytest.fixture(scope="module")
def on_a_laptop(tmp_path_factory):
    """What the script trains on without SageMaker."""
    return run(tmp_path_factory.mktemp("laptop"))[0]


@pytest.fixture(scope="module")
def in_a_job(tmp_path_factory):
    """What it trains on in a job with two data hosts."""
    return job(tmp_path_factory.mktemp("job"), 1)[0]


@pytest.mark.proof
@pytest.mark.parametrize("way", WAYS)
def test_a_script_trains_on_the_same_batches(way, on_a_laptop, in_a_job):
    """Folds, classes, attributes, epochs, bare loaders: what rank 0 has is what the data hosts run."""
    assert in_a_job[way] == on_a_laptop[way]


def trained(seen):
    """All numbers in some nested lists."""
    if isinstance(seen, list):
        return {number for part in seen for number in trained(part)}
    return {seen} if isinstance(seen, int) else set()


@pytest.mark.proof
def test_two_ranks_share_them(on_a_laptop, tmp_path):
    """Only rank 0 sends anything; the other one waits for it."""
    ranks = job(tmp_path, 2)
    assert len(ranks) == 2
    for way in WAYS:
        assert trained([rank[way] for rank in ranks]) - {3} == trained(on_a_laptop[way]) - {3}, way


@pytest.mark.proof
@pytest.mark.parametrize("groups", [(), ("--group", "trainer=1", "--group", "data=1")])
def test_a_fold_in_a_global_is_an_error_where_data_hosts_do_not_see_it(groups, tmp_path):
    """Without data hosts, the folds differ; with them, no second fold trains on the data of the first one."""
    prefix = ("-m", "lightning_sm", "local", *groups, "--base-dir", str(tmp_path), "--") if groups else ()
    ended = ran(tmp_path, *prefix, BY_A_GLOBAL, timeout_s=2 * TIMEOUT_S)
    text = ended.stdout + ended.stderr
    assert "fold 0 [0, 3, 6, 9]" in text
    assert ("fold 1 [1, 4, 7, 10]" in text, "fold 2 [2, 5, 8, 11]" in text) == (not groups, not groups)
    assert ("__main__.fold, which the code of Data reads, was 0 when" in text) == bool(groups)
    assert (ended.returncode == 0) == (not groups)
