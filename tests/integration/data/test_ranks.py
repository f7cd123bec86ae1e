"""Two trainer ranks share each epoch exactly, and train on what one rank with twice the batch size would."""

import json
import os
import re
import subprocess
import sys

import pytest

from lightning_sm import DataHost, RemoteDataModule
from tests.integration.data.numbers import quiet_trainer
from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.integration.scripts.train_ranks import NUM_TEST, NUM_TRAIN, Data, Model
from tests.quick_processes import python_path

# tests/integration/data/test_stream.py shows that ranks share an epoch, tests/integration/launcher that ranks train.
pytestmark = [pytest.mark.processes, pytest.mark.proof]

STAGES = {"train 0": NUM_TRAIN, "train 1": NUM_TRAIN, "val 0": NUM_TEST, "val 1": NUM_TEST, "test 2": NUM_TEST}
TIMEOUT_S = 180


def run(command, folder, **variables):
    """Run a command to its end; what each rank saw."""
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1", "SEEN": str(folder)}
    env |= variables
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one trainer on one data host saw, with twice the batch size."""
    model = Model()
    trainer = quiet_trainer(tmp_path_factory.mktemp("alone"), max_epochs=2)
    with DataHost(workers=1) as host:
        module = RemoteDataModule(Data(batch_size=10), [host.address])
        trainer.fit(model, datamodule=module)
        trainer.test(model, datamodule=module)
    # As the ranks write it.
    return json.loads(json.dumps(model.seen))


def assert_shared(ranks, alone):
    """Each sample once over both ranks, as many steps on either, and the global batches of one rank."""
    assert len(ranks) == 2
    for stage, num_samples in STAGES.items():
        steps = [rank[stage] for rank in ranks]
        assert len(steps[0]) == len(steps[1]) == len(alone[stage])
        seen = [index for rank in steps for batch in rank for index, _ in batch]
        assert sorted(seen) == list(range(num_samples))
        assert [first + second for first, second in zip(*steps, strict=True)] == alone[stage]


def test_two_trainers_on_two_data_hosts(alone, tmp_path):
    """In an emulated job: training, validation, and a test after it; exact tails, no padding, nothing dropped."""
    command = [sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=2", "--group", "data=2"]
    variables = {"PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": 1, "SEEN": tmp_path / "seen"}
    for name, value in variables.items():
        command += ["--env", f"{name}={value}"]
    command += ["--base-dir", str(tmp_path / "jobs"), "--", str(SCRIPTS / "train_ranks.py")]
    assert_shared(run(command, tmp_path / "seen"), alone)


def test_samplers_that_know_their_rank_are_split_over_the_ranks_once(tmp_path):
    """With use_distributed_sampler=False, as Lightning asks for; a split that cannot be seen is refused."""
    command = [sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=2", "--group", "data=1"]
    command += ["--env", f"PYTHONPATH={python_path(REPOSITORY)}", "--base-dir", str(tmp_path / "jobs"), "--"]
    kinds = ("subclass", "arguments", "duck")
    command += [str(SCRIPTS / "rank_samplers.py"), *kinds, "hidden"]
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=env)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    for kind in kinds:
        seen = re.findall(rf"SEEN {kind} 4 steps (\[.*?\])", output)
        assert sorted(number for numbers in seen for number in json.loads(numbers)) == list(range(64)), output
    assert re.search(r"SEEN hidden refused: train_dataloader\(\) has a Hidden, .*2 ranks.* Leave", output), output


def test_a_data_host_that_is_killed_is_not_missed(alone, tmp_path):
    """SIGKILL in the middle of the first epoch, and data that the user splits over the ranks: the same, bit for bit."""
    deadly = tmp_path / "killed"
    script = [sys.executable, str(SCRIPTS / "train_ranks.py")]
    with DataHost(workers=1) as first, DataHost(workers=1) as second:
        ranks = run(script, tmp_path / "seen", ADDRESSES=f"{first.address} {second.address}", DEADLY=str(deadly))
    assert deadly.exists()
    assert_shared(ranks, alone)
