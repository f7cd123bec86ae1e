"""Two emulated hosts train one script: what each of them leaves, and what each of them says."""

import re
import subprocess
import sys

import pytest
import torch
import yaml

from tests.integration.hosts import REPOSITORY, SCRIPTS
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

TIMEOUT_S = 180


def files_in(folder):
    """Relative paths of all files in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of two trainer hosts and one data host, which ended well: its folder."""
    folder = tmp_path_factory.mktemp("two_hosts")
    (folder / "points").mkdir()
    groups = ["--group", "trainer=2", "--group", "data=1"]
    places = ["--base-dir", str(folder / "jobs"), "--checkpoints", str(folder / "ck")]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "lightning_sm", "local", *groups, *places),
            *("--channel", f"training={folder / 'points'}", "--channel", f"extra={folder / 'points'}"),
            *("--env", f"PYTHONPATH={python_path(REPOSITORY)}", "--env", "OMP_NUM_THREADS=1", "--seed", "1"),
            *("--", str(SCRIPTS / "train_points.py")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (job_dir,) = (folder / "jobs").iterdir()
    return job_dir


@pytest.fixture(scope="module")
def hosts(job):
    """Folders of the trainers by rank, and last of the data host."""
    texts = {host: (host / "output" / "log.txt").read_text() for host in job.glob("algo-*")}
    data = [host for host, text in texts.items() if "role data" in text]
    trainers = sorted(host for host in texts if host not in data)
    return [*trainers, *data]


def log_of(host):
    """What a host wrote."""
    return (host / "output" / "log.txt").read_text()


@pytest.mark.parametrize("folder", ["model", "output/data"])
def test_no_two_hosts_leave_a_file_of_the_same_name(hosts, folder):
    """SageMaker puts the files of all hosts into one archive, where one of two would be lost."""
    found = [files_in(host / folder) for host in hosts]
    assert sum(map(len, found)) == len(set().union(*found)) > 0


def test_only_rank_0_leaves_a_model(hosts):
    """The first trainer has the three files, the others have none."""
    main, *others = (files_in(host / "model") for host in hosts)
    assert main == {"model.ckpt", "state_dict.pt", "config.yaml"}
    assert not any(others)
    assert set(torch.load(hosts[0] / "model" / "state_dict.pt", weights_only=True)) == {"layer.weight", "layer.bias"}


def test_config_yaml_fits_a_cluster_of_any_size(hosts):
    """It has the script's settings and the folders of channels, and nothing that the job has decided."""
    config = yaml.safe_load((hosts[0] / "model" / "config.yaml").read_text())
    assert config["data"]["data_dir"].endswith("/input/data/training")
    assert (config["trainer"]["num_nodes"], config["trainer"]["default_root_dir"]) == (1, None)


def test_each_host_has_an_output_folder_of_its_own(hosts):
    """What every trainer writes below default_root_dir is in a folder of the host's name, and it saw the channel."""
    for host in hosts[:2]:
        seen = host / "output" / "data" / host.name / "seen.txt"
        assert seen.read_text() == str(host.parent / "ml" / "input" / "data" / "training")


def test_checkpoints_are_uploaded(job):
    """The checkpoints, the log and the record of the run are where SageMaker synchronises them."""
    found = files_in(job.parents[1] / "ck")
    for ending in (".ckpt", "/config.yaml", "-rank-1.jsonl"):
        assert any(name.endswith(ending) for name in found), sorted(found)


def test_only_rank_0_writes_progress(hosts):
    """One line for each epoch, with the metric where metric_definitions look for it."""
    found = [re.findall(r"^epoch=\d/2 .*val_acc=([0-9.eE+-]+) ", log_of(host), re.MULTILINE) for host in hosts]
    assert [len(scores) for scores in found] == [2, 0, 0]
    assert all(0 <= float(score) <= 1 for score in found[0])


def test_only_rank_0_reports_the_channels(hosts):
    """One trainer says which argument each channel set, and which channel fits nothing; the data host makes nothing."""
    assert [log_of(host).count("'extra' matches none of") for host in hosts] == [1, 0, 0]
    assert [log_of(host).count("'training': data.data_dir = ") for host in hosts] == [1, 0, 0]


def test_the_data_host_serves_and_leaves_without_a_trace(hosts):
    """It serves both trainers, leaves with them, says so, and writes no file."""
    log = log_of(hosts[2])
    assert re.search(r"^Data host algo-\d serves at 127\.0\.0\.\d:\d+ \(workers: \d+\)", log, re.MULTILINE)
    assert "Data host done: both ranks have finished." in log
    assert not files_in(hosts[2] / "output" / "data")


def ours(host):
    """Lines of this project, in their order: without those of Lightning and torch, and of the script itself."""
    others = (
        r"$|-+$|/|Seed set|No seed|[GT]PU available|\S+ Tip: |Initializing distributed|distributed_backend|"
        r"All distributed|`Trainer\.fit` stopped|derived from"
    )
    return [line for line in log_of(host).splitlines() if not re.match(others, line)]


def test_an_epoch_of_a_healthy_cluster_has_one_line(hosts):
    """Rank 0 has its progress; no other host has a line between start and end."""
    main, *others = map(ours, hosts)
    first, last = (next(n for n, line in enumerate(main) if line.startswith(f"epoch={epoch}/2")) for epoch in (1, 2))
    # On a busy machine, training may wait for a second.
    assert not [line for line in main[first + 1 : last] if not line.startswith("Epoch 2: ")]
    for progress in (first, last):
        assert re.fullmatch(
            r"epoch=\d/2 step=\d validation=\d val_acc=\S+ steps_per_s=.* data_wait=[\d.]+%", main[progress]
        )
    assert not [line for lines in others for line in lines if re.search(r"[eE]poch|wait|batches", line)]


def test_a_start_is_short(hosts):
    """At most 15 lines on rank 0 and 3 on any other host, besides what is to be corrected (the extra channel)."""
    starts = []
    for host in hosts:
        lines = [line for line in ours(host) if "'extra' matches none" not in line]
        ends = [n for n, line in enumerate(lines) if line.startswith(("epoch=", "Data host done"))]
        starts.append(lines[: ends[0]] if ends else lines)
    assert [len(starts[0]) <= 15, *(len(start) <= 3 for start in starts[1:])] == [True] * 3, starts
