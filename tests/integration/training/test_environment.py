"""SageMakerEnvironment in real processes: plain, torchrun and ddp_spawn, and jobs that must fail at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections import Counter

import pytest

from tests.integration.hosts import TIMEOUT_S, Hosts, check_rank_variables, script
from tests.integration.rank_launchers import torchrun

pytestmark = pytest.mark.processes

# Stale rank variables, which are wrong in this job.
STRAYS = {"NODE_RANK": "7", "LOCAL_RANK": "3", "RANK": "5", "WORLD_SIZE": "9", "MASTER_ADDR": "192.0.2.1"}
STAGES = ("1 fit", "1 test", "2 fit")


@pytest.fixture
def hosts(tmp_path):
    """Two hosts of one job."""
    return Hosts(tmp_path)


def _torchrun(hosts, order, *arguments):
    """Return each host's torchrun command, with node ranks in the given order and two ranks per host."""
    return torchrun(hosts, order, script(*arguments), processes=2)


def _in_group_at_exit(hosts):
    """Return, for each process, whether it still had a process group after all exit handlers."""
    return [json.loads(path.read_text())["in_group"] for path in hosts.folder.glob("*/output/end-*.json")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A job of two hosts with two devices each, two Trainers in a row, and stale rank variables."""
    hosts = Hosts(tmp_path_factory.mktemp("plain"))
    command = script("meet.py", {"devices": 2}, "fit,test", "fit")
    return hosts, hosts.run(dict.fromkeys(hosts.names, command), STRAYS)


@pytest.mark.parametrize("stage", STAGES)
def test_plain_processes_form_one_world_in_every_stage(plain, stage):
    """Lightning starts the other local rank of each host, and the same four ranks meet in fit, test and fit."""
    hosts, ended = plain
    assert [ended[host].code for host in hosts.names] == [0, 0]
    seen = hosts.seen(stage)
    assert [(rank["host"], rank["node_rank"], rank["local_rank"], rank["rank"]) for rank in seen] == [
        ("algo-1", 0, 0, 0),
        ("algo-1", 0, 1, 1),
        ("algo-2", 1, 0, 2),
        ("algo-2", 1, 1, 3),
    ]
    for rank in seen:
        assert rank["world_size"] == 4
        assert rank["met"] == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_rank_variables_are_those_that_torchrun_would_set(plain, stage):
    """Each rank has RANK and the like, and no local rank inherits them from the process that started it."""
    hosts, _ = plain
    check_rank_variables(hosts.seen(stage), devices=2)
    assert [rank["inherited"] for rank in hosts.seen(stage)] == [STRAYS["RANK"], None] * 2


def test_main_address_and_port_are_those_of_the_first_host(plain):
    """Every rank connects to the first host in sorted order, at the port that is derived from the job."""
    hosts, _ = plain
    assert {(rank["address"], rank["port"]) for rank in hosts.seen()} == {("127.0.0.2", str(hosts.main_port))}


def test_stray_rank_variables_are_ignored_and_named(plain):
    """Each host warns once about rank variables that nothing in this job has set."""
    _, ended = plain
    for end in ended.values():
        assert end.output.count("Ignoring ") == 1
        assert "LOCAL_RANK=3, MASTER_ADDR=192.0.2.1, NODE_RANK=7, RANK=5, WORLD_SIZE=9: not set by" in end.output


def test_processes_leave_their_group_before_the_interpreter_ends(plain):
    """Every rank destroys its process group before the interpreter's shutdown, when Gloo's threads might abort it."""
    hosts, _ = plain
    assert _in_group_at_exit(hosts) == [False] * 4


def test_table_of_hosts_is_printed_once(plain):
    """Rank 0 alone prints hosts, groups, roles, ranks, main address and versions, once for all Trainers."""
    hosts, ended = plain
    output = ended["algo-1"].output
    lines = [line.split() for line in output.splitlines()]
    assert lines.count(["algo-1*", "homogeneousCluster", "ml.g5.xlarge", "trainer", "0", "0-1"]) == 1
    assert lines.count(["algo-2", "homogeneousCluster", "ml.g5.xlarge", "trainer", "1", "2-3"]) == 1
    assert f"main address algo-1:{hosts.main_port}, interface lo" in output
    assert "lightning_sm 0.1.0, pytorch_lightning 2." in output
    assert "node rank" not in ended["algo-2"].output


def test_interface_of_the_job_reaches_all_ranks(plain):
    """Every rank makes Gloo use the job's network interface, which exists on this machine."""
    hosts, _ = plain
    assert Counter(rank["interface"] for rank in hosts.seen("1 fit")) == {"lo": 4}


@pytest.mark.proof
def test_ranks_need_no_prepared_process(hosts):
    """With a plain Trainer and the environment, the same four ranks meet in two fits, and no variable is set."""
    command = script("meet.py", {"devices": 2}, "fit", "fit")
    ended = hosts.run(dict.fromkeys(hosts.names, command), {"UNPREPARED": "1"})
    assert [ended[host].code for host in hosts.names] == [0, 0]
    for stage in ("1 fit", "2 fit"):
        assert [(rank["host"], rank["rank"], rank["met"]) for rank in hosts.seen(stage)] == [
            ("algo-1", 0, [0, 1, 2, 3]),
            ("algo-1", 1, [0, 1, 2, 3]),
            ("algo-2", 2, [0, 1, 2, 3]),
            ("algo-2", 3, [0, 1, 2, 3]),
        ]
    assert {rank["variables"]["RANK"] for rank in hosts.seen()} == {None}


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("order", [("algo-1", "algo-2"), ("algo-2", "algo-1")])
def test_torchrun_decides_on_ranks_and_main_address(hosts, order):
    """Ranks, main address and port are torchrun's, even if it orders the hosts differently."""
    # No host name resolves to an address here, so only torchrun's main address can work.
    ended = hosts.run(_torchrun(hosts, order, "meet.py", {"devices": 2}, "fit"), {"LIGHTNING_SM_HOST_ADDRESSES": "{}"})
    assert [ended[host].code for host in hosts.names] == [0, 0]
    seen = hosts.seen()
    assert [(rank["host"], rank["node_rank"], rank["local_rank"]) for rank in seen] == [
        (order[0], 0, 0),
        (order[0], 0, 1),
        (order[1], 1, 0),
        (order[1], 1, 1),
    ]
    assert all(rank["met"] == [0, 1, 2, 3] for rank in seen)
    check_rank_variables(seen, devices=2)
    assert {rank["address"] for rank in seen} == {hosts.address(order[0])}
    differs = "torchrun orders the hosts differently from the table"
    assert [ended[host].output.count(differs) for host in order] == [order[0] != "algo-1"] * 2


@pytest.mark.proof
def test_torchrun_of_one_host_alone_is_refused(hosts):
    """A torchrun that was not told about the other host fails with the table of hosts instead of training alone."""
    (end,) = hosts.run(_torchrun(hosts, ("algo-2",), "meet.py", {"devices": 2}, "fit")).values()
    assert end.code == 1
    assert (
        "TopologyError: torchrun set world size 2 and local world size 2, but the job needs world size 4: "
        in end.output
    )
    assert "algo-2*  homogeneousCluster" in end.output


@pytest.mark.proof
def test_spawned_workers_get_their_own_ranks(hosts):
    """With ddp_spawn, workers get the pickled environment, and each still has a different rank."""
    command = script("meet.py", {"devices": 2, "strategy": "ddp_spawn"}, "fit")
    ended = hosts.run(dict.fromkeys(hosts.names, command))
    assert [ended[host].code for host in hosts.names] == [0, 0]
    assert [(rank["host"], rank["rank"], rank["met"]) for rank in hosts.seen()] == [
        ("algo-1", 0, [0, 1, 2, 3]),
        ("algo-1", 1, [0, 1, 2, 3]),
        ("algo-2", 2, [0, 1, 2, 3]),
        ("algo-2", 3, [0, 1, 2, 3]),
    ]
    check_rank_variables(hosts.seen(), devices=2)
    assert ended["algo-1"].output.count("main address algo-1") == 1
    # Four workers, and their two parents, which never had a group.
    assert _in_group_at_exit(hosts) == [False] * 6


@pytest.mark.proof
@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        (
            {},
            [
                {"num_nodes": 3, "devices": 1},
                {"num_nodes": 4, "devices": 1},
                {"num_nodes": 1, "devices": 2},
                {"num_nodes": 1, "devices": 1, "strategy": "ddp"},
            ],
        ),
        (
            {"LIGHTNING_SM_DEVICES": "1"},
            [{"num_nodes": 2, "devices": 2}, {"num_nodes": 2, "devices": 2, "strategy": "ddp_spawn"}],
        ),
    ],
)
def test_trainer_settings_that_contradict_the_cluster_are_refused_at_once(hosts, variables, settings):
    """Wrong num_nodes or devices raise an error with the table of hosts at once, on every host."""
    command = script("contradict.py", *settings)
    ended = hosts.run(dict.fromkeys(hosts.names, command), variables)
    assert [end.code for end in ended.values()] == [0, 0]
    for host in hosts.names:
        attempts = json.loads((hosts.folder / host / "output" / "ended.json").read_text())
        assert len(attempts) == len(settings)
        for attempt in attempts:
            assert "trainer hosts" in attempt["error"]
            assert f"{host}*  homogeneousCluster  ml.g5.xlarge  trainer" in attempt["error"]
            assert "Set num_nodes=2" in attempt["error"]
            assert attempt["seconds"] < 20  # looking for the main host would take minutes


@pytest.mark.proof
def test_contradiction_ends_the_job(hosts):
    """A script that asks for a third host fails on every host within seconds, with an error about num_nodes."""
    ended = hosts.run(dict.fromkeys(hosts.names, script("meet.py", {"num_nodes": 3, "devices": 1}, "fit")))
    failed = [end for end in ended.values() if end.code is not None]
    assert failed
    for end in failed:
        assert end.code == 1
        assert "TopologyError: Trainer(num_nodes, devices) gives world size 3" in end.output


def test_training_alone_by_mistake_is_an_error(hosts):
    """With num_nodes=1 and one device, Lightning never asks the environment, so fit fails before its first step."""
    ended = hosts.run({"algo-2": script("meet.py", {"num_nodes": 1, "devices": 1}, "fit")})
    assert ended["algo-2"].code == 1
    last_words = ended["algo-2"].output[-2500:]
    assert "Trainer(num_nodes=1) does not match the number of trainer hosts in the job, 2" in last_words
    assert "each of these hosts would train a model of its own" in last_words
    assert "algo-2*  homogeneousCluster" in last_words


def test_taken_main_port_ends_the_job_at_once(hosts):
    """Rank 0 fails with an error that names the port if another process listens on it."""
    with socket.create_server(("", hosts.main_port)):
        ended = hosts.run(dict.fromkeys(hosts.names, script("meet.py", {"devices": 1}, "fit")))
    assert ended["algo-1"].code == 1
    assert (
        f"PortInUseError: Port {hosts.main_port}, on which rank 0 must listen on host 'algo-1'"
        in ended["algo-1"].output
    )
    assert ended["algo-2"].code is None


@pytest.mark.proof  # the rule has unit tests
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to replace /etc/hosts for one process")
def test_name_that_resolves_later_is_waited_for(hosts, tmp_path):
    """A host that cannot resolve the main host logs the name that it waits for, and continues once it resolves."""
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n")
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names)]
    process = subprocess.Popen(
        [*mount, *script("find_main.py", str(TIMEOUT_S))],
        env={**hosts.env("algo-2"), "LIGHTNING_SM_HOST_ADDRESSES": "{}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Waiting for") and len(lines) == 1:
                with names.open("a") as file:
                    file.write("192.0.2.7 algo-1\n")
        assert process.wait() == 0
    finally:
        timer.cancel()
        timer.join()
        process.kill()
        process.communicate()
    assert lines[0].startswith("Waiting for the name of the main host algo-1 to resolve (timeout in ")
    assert "main address: algo-1\n" in lines


def test_name_that_never_resolves_ends_the_process(hosts):
    """After the time limit, the error names the host that does not resolve."""
    addresses = {"algo-1": "algo-1.invalid", "algo-2": hosts.address("algo-2")}
    ended = hosts.run({"algo-2": script("find_main.py", "0")}, {"LIGHTNING_SM_HOST_ADDRESSES": json.dumps(addresses)})
    assert ended["algo-2"].code == 1
    expected = "HostResolutionError: The name of the main host 'algo-1' did not resolve within 0 s."
    assert expected in ended["algo-2"].output
