"""The hosts of an emulated cluster before anything runs on them: groups, addresses, port and folders."""

from __future__ import annotations

import json
import os
import socket

import pytest

from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.errors import PortInUseError, TopologyError
from lightning_sm.job.emulated_service import GroupSpec
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import JOB_SECRET


def _job(host):
    return SageMakerJob.from_environment(host.env, base_dir=host.folder)


def _groups(cluster):
    job = _job(cluster.hosts[0])
    return [(group.name, group.hosts) for group in job.groups]


def test_groups_are_dealt_at_random_and_repeat_with_a_seed(tmp_path):
    """The same seed assigns the same hosts to groups, other seeds do not, and the order of hosts is arbitrary."""
    groups = [GroupSpec("trainer", 4), GroupSpec("data", 8)]
    drawn = []
    for seed in (1, 1, 2, 3):
        with LocalCluster(ClusterSpec(groups, seed=seed), tmp_path) as cluster:
            drawn.append(_groups(cluster))
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] != drawn[3]
    assert any(hosts != tuple(sorted(hosts)) for _, hosts in drawn[0])


def test_another_attempt_is_another_draw(tmp_path):
    """The next attempt reassigns hosts, reproducibly by seed, keeps name, port and paths, and empties the folders."""
    spec = ClusterSpec([GroupSpec("trainer", 4), GroupSpec("data", 8)], seed=1, keeps_checkpoints=True)
    drawn = []
    for _ in range(2):
        with LocalCluster(spec, tmp_path) as cluster:
            first, name, folder = _groups(cluster), cluster.name, cluster.hosts[0].folder
            port = Topology.from_job(_job(cluster.hosts[0])).main_port
            (folder / "model" / "left").touch()
            (cluster.bucket / "last").touch()
            cluster.next_attempt()
            second = _groups(cluster)
            cluster.next_attempt()
            jobs = [_job(host) for host in cluster.hosts]
            drawn.append([first, second, _groups(cluster)])
            assert {Topology.from_job(job).main_port for job in jobs} == {port}
            assert (cluster.name, cluster.hosts[0].folder) == (name, folder)
            assert not (folder / "model" / "left").exists()
            assert len({job.checkpoint_dir for job in jobs}) == 1
            assert all((host.checkpoint_dir / "last").exists() for host in cluster.hosts)
            assert all(Topology.from_job(job).role is host.role for job, host in zip(jobs, cluster.hosts, strict=True))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1] != drawn[0][2]
    assert not list(tmp_path.iterdir())


def test_resource_config_is_the_services(tmp_path):
    """resourceconfig.json has exactly the service's keys, and lists hosts in text order."""
    with LocalCluster(ClusterSpec([GroupSpec("gpu", 10, "ml.g5.xlarge"), GroupSpec("data", 1)]), tmp_path) as cluster:
        for host in cluster.hosts:
            config = json.loads((host.folder / "input" / "config" / "resourceconfig.json").read_text())
            assert sorted(config) == [
                "current_group_name",
                "current_host",
                "current_instance_type",
                "hosts",
                "instance_groups",
                "network_interface_name",
            ]
            assert config["hosts"][:3] == ["algo-1", "algo-10", "algo-11"]
            assert (config["current_host"], config["current_group_name"]) == (host.name, host.group)
            assert sorted(config["instance_groups"][0]) == ["hosts", "instance_group_name", "instance_type"]
            assert host.role is (Role.DATA if host.group == "data" else Role.TRAINER)


def test_all_hosts_agree_on_a_free_port_and_have_addresses(tmp_path):
    """Every host derives the same topology, with one free port and a distinct address for each host."""
    with LocalCluster(ClusterSpec([GroupSpec("trainer", 3)], devices=2), tmp_path) as cluster:
        jobs = [_job(host) for host in cluster.hosts]
        (port,) = {Topology.from_job(job).main_port for job in jobs}
        assert len(set(jobs[0].addresses.values())) == 3
        assert jobs[0].devices == 2
        with socket.create_server((jobs[0].addresses[Topology.from_job(jobs[0]).main_host], port)):
            pass


def test_stated_port_that_is_taken_is_refused(tmp_path):
    """A main port that the user chose and another process uses raises an error that names it."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        with pytest.raises(PortInUseError, match=port):
            LocalCluster(ClusterSpec(environment={"LIGHTNING_SM_MAIN_PORT": port}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_stated_port_of_another_emulated_job_is_refused(tmp_path):
    """A job holds its port from start to end, even while none of its hosts listens."""
    with LocalCluster(ClusterSpec(), tmp_path) as other:
        port = Topology.from_job(_job(other.hosts[0])).main_port
        spec = ClusterSpec(environment={"LIGHTNING_SM_MAIN_PORT": str(port)})
        with pytest.raises(PortInUseError, match=f"Port {port} belongs to another job"):
            LocalCluster(spec, tmp_path)
    with LocalCluster(spec, tmp_path) as cluster:
        assert Topology.from_job(_job(cluster.hosts[0])).main_port == port


def test_hosts_of_a_job_share_a_secret_that_no_other_job_has(tmp_path, monkeypatch):
    """All hosts share one secret in all attempts, which differs from this shell's and from any other job's."""
    monkeypatch.setenv(JOB_SECRET.name, "of this shell, and long enough for one")
    seen = []
    for _ in range(2):
        with LocalCluster(ClusterSpec([GroupSpec("trainer", 2), GroupSpec("data", 1)]), tmp_path) as cluster:
            secrets = {JOB_SECRET.read(host.env) for host in cluster.hosts}
            cluster.next_attempt()
            (secret,) = secrets | {JOB_SECRET.read(host.env) for host in cluster.hosts}
            seen.append(secret)
    assert len({None, os.environ[JOB_SECRET.name], *seen}) == 4


def test_data_groups_can_be_named(tmp_path):
    """LIGHTNING_SM_DATA_GROUPS in the job's environment decides the roles; an unknown group is refused."""
    groups = [GroupSpec("a", 1), GroupSpec("b", 1)]
    with LocalCluster(ClusterSpec(groups, environment={"LIGHTNING_SM_DATA_GROUPS": "b"}), tmp_path) as cluster:
        assert {host.group: host.role for host in cluster.hosts} == {"a": Role.TRAINER, "b": Role.DATA}
    with pytest.raises(TopologyError, match="no such group"):
        LocalCluster(ClusterSpec(groups, environment={"LIGHTNING_SM_DATA_GROUPS": "c"}), tmp_path)


def test_cluster_removes_its_folders_even_after_an_error(tmp_path):
    """The context manager removes the folders, even after an error, unless ``keep`` is set."""
    with pytest.raises(ZeroDivisionError), LocalCluster(ClusterSpec(), tmp_path / "jobs"):
        _ = 1 / 0
    assert list((tmp_path / "jobs").iterdir()) == []
    with LocalCluster(ClusterSpec(), tmp_path / "jobs") as cluster:
        cluster.keep = True
    assert cluster.job_dir.is_dir()
