"""A script trained on two emulated hosts: the files and the log of each host."""

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
    """The folder of a successful job of two trainer hosts and one data host."""
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
    """Return the hosts' folders: the trainers in the order of their ranks, then the data host."""
    texts = {host: (host / "output" / "log.txt").read_text() for host in job.glob("algo-*")}
    data = [host for host, text in texts.items() if "role data" in text]
    trainers = sorted(host for host in texts if host not in data)
    return [*trainers, *data]


def log_of(host):
    """Return a host's log."""
    return (host / "output" / "log.txt").read_text()


@pytest.mark.parametrize("folder", ["model", "output/data"])
def test_no_two_hosts_leave_a_file_of_the_same_name(hosts, folder):
    """File names differ between hosts, because SageMaker merges all files into one archive and would lose one."""
    found = [files_in(host / folder) for host in hosts]
    assert sum(map(len, found)) == len(set().union(*found)) > 0


def test_only_rank_0_leaves_a_model(hosts):
    """Rank 0 writes three model files, and the other hosts write none."""
    main, *others = (files_in(host / "model") for host in hosts)
    assert main == {"model.ckpt", "state_dict.pt", "config.yaml"}
    assert not any(others)
    assert set(torch.load(hosts[0] / "model" / "state_dict.pt", weights_only=True)) == {"layer.weight", "layer.bias"}


def test_config_yaml_fits_a_cluster_of_any_size(hosts):
    """config.yaml has the script's settings and the folders of channels, but nothing that the job decided."""
    config = yaml.safe_load((hosts[0] / "model" / "config.yaml").read_text())
    assert config["data"]["data_dir"].endswith("/input/data/training")
    assert (config["trainer"]["num_nodes"], config["trainer"]["default_root_dir"]) == (1, None)


def test_each_host_has_an_output_folder_of_its_own(hosts):
    """Each trainer writes below default_root_dir to a folder with its host's name, and reads the channel."""
    for host in hosts[:2]:
        seen = host / "output" / "data" / host.name / "seen.txt"
        assert seen.read_text() == str(host.parent / "ml" / "input" / "data" / "training")


def test_checkpoints_are_uploaded(job):
    """Checkpoints, logs and the record of the run are written to the folder that SageMaker uploads."""
    found = files_in(job.parents[1] / "ck")
    for ending in (".ckpt", "/config.yaml", "-rank-1.jsonl"):
        assert any(name.endswith(ending) for name in found), sorted(found)


def test_only_rank_0_writes_progress(hosts):
    """Rank 0 writes one line per epoch, with the metric in the form that metric_definitions expect."""
    found = [re.findall(r"^epoch=\d/2 .*val_acc=([0-9.eE+-]+) ", log_of(host), re.MULTILINE) for host in hosts]
    assert [len(scores) for scores in found] == [2, 0, 0]
    assert all(0 <= float(score) <= 1 for score in found[0])


def test_only_rank_0_reports_the_channels(hosts):
    """Only rank 0 logs which argument each channel set, and which channel matches no argument."""
    assert [log_of(host).count("'extra' matches none of") for host in hosts] == [1, 0, 0]
    assert [log_of(host).count("'training': data.data_dir = ") for host in hosts] == [1, 0, 0]


def test_the_data_host_serves_and_leaves_without_a_trace(hosts):
    """The data host serves both trainers, exits and logs so when they have finished, and writes no file."""
    log = log_of(hosts[2])
    assert re.search(r"^Data host algo-\d serves at 127\.0\.0\.\d:\d+ \(workers: \d+\)", log, re.MULTILINE)
    assert "Data host done: both ranks have finished." in log
    assert not files_in(hosts[2] / "output" / "data")


def ours(host):
    """Return the log lines of lightning_sm, without those of Lightning, torch and the script."""
    others = (
        r"$|-+$|/|Seed set|No seed|[GT]PU available|\S+ Tip: |Initializing distributed|distributed_backend|"
        r"All distributed|`Trainer\.fit` stopped|derived from"
    )
    return [line for line in log_of(host).splitlines() if not re.match(others, line)]


def test_an_epoch_of_a_healthy_cluster_has_one_line(hosts):
    """During an epoch, rank 0 logs only its progress, and the other hosts log nothing."""
    main, *others = map(ours, hosts)
    first, last = (next(n for n, line in enumerate(main) if line.startswith(f"epoch={epoch}/2")) for epoch in (1, 2))
    # Ignore warnings of epoch 2: on a busy machine, training may wait for a second.
    assert not [line for line in main[first + 1 : last] if not line.startswith("Epoch 2: ")]
    for progress in (first, last):
        assert re.fullmatch(
            r"epoch=\d/2 step=\d validation=\d val_acc=\S+ steps_per_s=.* data_wait=[\d.]+%", main[progress]
        )
    assert not [line for lines in others for line in lines if re.search(r"[eE]poch|wait|batches", line)]


def test_a_start_is_short(hosts):
    """Startup takes at most 15 log lines on rank 0 and 3 on other hosts, besides the hint about the extra channel."""
    starts = []
    for host in hosts:
        lines = [line for line in ours(host) if "'extra' matches none" not in line]
        ends = [n for n, line in enumerate(lines) if line.startswith(("epoch=", "Data host done"))]
        starts.append(lines[: ends[0]] if ends else lines)
    assert [len(starts[0]) <= 15, *(len(start) <= 3 for start in starts[1:])] == [True] * 3, starts
