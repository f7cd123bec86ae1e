"""A script whose loaders have their workers on data hosts sees the same batches as with stock Lightning."""

import json
import os
import subprocess
import sys

import pytest

from tests.differential.cases import case
from tests.differential.fits import Noted, Pass, Seen
from tests.differential.same import differences, runner
from tests.integration.hosts import REPOSITORY, SCRIPTS, TIMEOUT_S
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

# Stateful samplers that are not read to the end, streams, batch samplers, several Trainers.
# `python -m tests.differential.same` runs others.
CASES = (34, 80, 302, 459, 6)
MORE = (538, 486, 242, 737, 1358, 144, 939, 1202, 65, 7, 15, 175, 959, 319)  # the last five have two ranks


@pytest.mark.parametrize("numbers", [CASES, pytest.param(MORE, marks=pytest.mark.proof)], ids=["some", "more"])
def test_scripts_see_the_batches_of_stock_lightning(numbers):
    """Only the random numbers of indexed datasets may differ."""
    with runner() as run:
        found = {number: run(number) for number in numbers}
    assert not {f"case {number} ({case(number).words})": what for number, what in found.items() if what}


def test_what_differs_is_found():
    """The comparison finds another batch, a missing batch, another random number in a stream, and a failed run."""
    number = next(number for number in range(100) if is_stream(case(number)))
    script, key = case(number), Pass(0, "train", 0)
    batches = [Noted(0, [index], [index]) for index in range(3)]
    right = Seen({key: batches})
    assert not list(differences(script, [right], [right]))
    for wrong in ([batches[1], batches[0], batches[2]], batches[:2], [*batches[:2], batches[2]._replace(draws=[7])]):
        assert list(differences(script, [right], [Seen({key: wrong})]))
    assert list(differences(script, [right], [Seen({}, {0: "an error"})]))


def is_stream(script):
    """Whether a script trains on a stream on one rank."""
    train = script.loaders(0, "train")
    return script.world_size == 1 and train.shape == "one" and train.has("stream")


def in_a_job(folder, script, *arguments, trainers, data_hosts, options=()):
    """Run a script in a job, and return what each rank wrote, in rank order."""
    groups = ["--group", f"trainer={trainers}", *(["--group", f"data={data_hosts}"] if data_hosts else [])]
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [
        *(sys.executable, "-m", "lightning_sm", "local"),
        *groups,
        *options,
        "--base-dir",
        str(folder / "hosts"),
        "--",
    ]
    ended = subprocess.run(
        [*command, str(SCRIPTS / script), str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * TIMEOUT_S,
        env=env,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-?.json"))]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """What two ranks read without data hosts, by script."""
    read = {}

    def by(script):
        if script not in read:
            read[script] = in_a_job(tmp_path_factory.mktemp("stock"), script, trainers=2, data_hosts=0)
            assert len(read[script]) == 2
        return read[script]

    return by


@pytest.mark.parametrize("script", ["read_with_fabric.py", pytest.param("train_many_ways.py", marks=pytest.mark.proof)])
def test_two_ranks_of_a_job_read_the_same_with_data_hosts(stock, script, tmp_path):
    """Both ranks read the same with Fabric, SageMakerTrainer with and without a DataModule, and SageMakerCLI."""
    assert in_a_job(tmp_path, script, trainers=2, data_hosts=1) == stock(script)


@pytest.mark.proof
def test_two_ranks_of_a_job_read_the_same_where_data_hosts_run_the_hooks(stock, tmp_path):
    """Trainers get loaders (without datasets), attributes and random states from hooks that data hosts run."""
    script = "train_many_ways.py"
    assert in_a_job(tmp_path, script, "data", trainers=2, data_hosts=2) == stock(script)


def test_a_channel_of_the_data_group_alone_needs_no_line_of_the_script(tmp_path):
    """With SageMakerTrainer and SageMakerCLI, data hosts run the hooks, which read the channel."""
    channel = tmp_path / "channel"
    channel.mkdir()
    for number in range(8):
        (channel / f"{number}.txt").write_text(str(number))
    (folder := tmp_path / "seen").mkdir()
    options = ["--channel", f"training={channel}"]
    seen = in_a_job(folder, "train_on_a_channel_of_data_hosts.py", trainers=2, data_hosts=1, options=options)
    for kind in ("trainer", "cli"):
        assert sorted(number for rank in seen for number in rank[kind]) == list(range(8))
    assert [rank["classes"] for rank in seen] == [[8, 8], [8, 8]]
