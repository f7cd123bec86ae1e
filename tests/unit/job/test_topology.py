"""Every host of a job computes the same layout, whatever the order in the service's file."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from tests.fakes.job_folder import make_job

CPU, GPU, FOUR_GPUS = "ml.c5.9xlarge", "ml.g5.xlarge", "ml.g5.12xlarge"


@st.composite
def jobs(draw: st.DrawFn) -> SageMakerJob:
    """Generate a job of 1 to 20 hosts in 1 to 4 shuffled groups, at least one of which trains."""
    suffix = draw(st.sampled_from(["", "-d0zia", "-ab12c"]))
    hosts = draw(st.permutations([f"algo-{index}{suffix}" for index in range(1, draw(st.integers(1, 20)) + 1)]))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(hosts) - 1)), max_size=min(3, len(hosts) - 1))))
    bounds = [0, *cuts, len(hosts)]
    names = draw(st.permutations(["gpu", "data_a", "data_b", "other"]))
    groups = {name: hosts[start:end] for name, start, end in zip(names, bounds, bounds[1:], strict=False)}
    if all(name.startswith("data") for name in groups):
        groups["gpu"] = groups.pop(next(iter(groups)))
    return make_job(groups, name=draw(st.none() | st.text(max_size=10)))


def views(job: SageMakerJob) -> list[Topology]:
    """Return the layout as computed by each host of the job."""
    return [Topology.from_job(dataclasses.replace(job, current_host=host)) for host in job.hosts]


@given(jobs())
def test_all_hosts_agree_on_everything_but_themselves(job):
    """Main host, port, number of nodes and order of hosts are the same on every host."""
    common = {dataclasses.replace(view, current_host="") for view in views(job)}
    assert len(common) == 1
    topology = common.pop()
    assert topology.main_host == min(topology.trainer_hosts)
    assert topology.num_nodes == len(topology.trainer_hosts) >= 1
    assert sorted(topology.trainer_hosts + topology.data_hosts) == sorted(job.hosts)


@given(jobs())
def test_node_ranks_of_trainer_hosts_are_a_permutation(job):
    """Each trainer host has a unique rank below num_nodes, and the main host has rank 0."""
    trainers = [view for view in views(job) if view.role is Role.TRAINER]
    assert sorted(view.node_rank for view in trainers) == list(range(trainers[0].num_nodes))
    assert [view.current_host for view in trainers if view.node_rank == 0] == [trainers[0].main_host]


@given(jobs())
def test_data_hosts_have_no_rank(job):
    """Reading a data host's rank raises an error that shows the alternative and the layout."""
    for view in views(job):
        if view.role is Role.DATA:
            expected = rf"^Host '{view.current_host}' serves data and has no rank\. .*SageMakerCLI .*SageMakerTrainer "
            with pytest.raises(TopologyError, match=expected + r".*\nhost +"):
                _ = view.node_rank


@given(jobs(), st.randoms())
def test_order_of_groups_and_hosts_in_the_file_does_not_matter(job, random):
    """The service shuffles groups and hosts at every start, so the layout depends on names only."""
    groups = [
        dataclasses.replace(group, hosts=tuple(random.sample(group.hosts, len(group.hosts)))) for group in job.groups
    ]
    random.shuffle(groups)
    hosts = tuple(random.sample(job.hosts, len(job.hosts)))
    shuffled = Topology.from_job(dataclasses.replace(job, groups=tuple(groups), hosts=hosts))
    original = Topology.from_job(job)
    assert dataclasses.replace(shuffled, groups=()) == dataclasses.replace(original, groups=())
    assert shuffled.table(devices=2) == original.table(devices=2)


# ---- roles


@pytest.mark.parametrize(
    ("instance_types", "trainers"),
    [
        # Names decide first, whatever the instance types.
        ({"data_group": GPU, "gpu": GPU}, ["gpu"]),
        ({"DataServers": CPU, "trainers": CPU}, ["trainers"]),
        ({"data": CPU, "database": CPU, "x": GPU}, ["x"]),
        ({"data": FOUR_GPUS, "cpu": CPU, "more": CPU}, ["cpu", "more"]),
        # Then CPU-only groups beside accelerated ones serve data.
        ({"one": CPU, "two": GPU}, ["two"]),
        ({"one": "ml.m5.large", "two": "ml.trn1.2xlarge"}, ["two"]),
        ({"one": "ml.r7i.large", "two": "ml.p4d.24xlarge", "three": "ml.t3.medium"}, ["two"]),
        ({"one": "ml.c5n.xlarge", "two": "ml.inf2.xlarge"}, ["two"]),
        ({"one": "ml.c6gn.xlarge", "two": "ml.dl1.24xlarge"}, ["two"]),
        ({"one": "ml.c5.xlarge", "two": "ml.gr6.4xlarge"}, ["two"]),
        ({"one": "ml.c5.xlarge", "two": "ml.p6-b200.48xlarge"}, ["two"]),
        # An unknown instance type does not count as a CPU type.
        ({"one": None, "two": GPU}, ["one", "two"]),
        ({"one": "local", "two": "local_gpu"}, ["one", "two"]),
        # Otherwise, all groups train.
        ({"one": CPU, "two": "ml.m5.large"}, ["one", "two"]),
        ({"one": GPU, "two": "ml.g5.2xlarge"}, ["one", "two"]),
        ({"homogeneousCluster": CPU}, ["homogeneousCluster"]),
    ],
)
def test_roles_follow_names_then_instances(instance_types, trainers):
    """Groups named data serve data; otherwise CPU groups do if others have accelerators; otherwise all groups train."""
    job = make_job({name: [f"algo-{name}"] for name in instance_types}, instance_types=instance_types)
    topology = Topology.from_job(job)
    assert topology.trainer_hosts == tuple(sorted(f"algo-{name}" for name in trainers))
    for name in instance_types:
        assert topology.role_of(f"algo-{name}") is (Role.TRAINER if name in trainers else Role.DATA)


GROUPS = {"data_group": ["algo-3"], "gpu": ["algo-2", "algo-1"]}


@pytest.mark.parametrize(
    ("argument", "setting", "data_hosts"),
    [
        (None, None, ("algo-3",)),
        (["gpu"], None, ("algo-1", "algo-2")),
        (None, ("gpu",), ("algo-1", "algo-2")),
        (["data_group"], ("gpu",), ("algo-3",)),
        ([], ("gpu",), ()),
        ([], None, ()),
        (None, (), ()),
    ],
)
def test_stated_data_groups_win_over_the_rules(argument, setting, data_hosts):
    """The argument wins over the job's setting, which wins over names; an empty list means that all groups train."""
    topology = Topology.from_job(make_job(GROUPS, data_groups=setting), data_groups=argument)
    assert topology.data_hosts == data_hosts


def test_a_single_group_can_be_stated_to_train():
    """A group named like a data group trains if the user passes an empty list of data groups."""
    assert Topology.from_job(make_job({"data": ["b", "a"]}), data_groups=[]).trainer_hosts == ("a", "b")


# ---- errors


def test_unknown_data_group_is_an_error_with_the_groups():
    """The error for a misspelled group lists the existing groups and their source."""
    with pytest.raises(TopologyError, match=r"(?s)\['dta', 'x'\] were requested.*resourceconfig\.json.*data_group +-"):
        Topology.from_job(make_job(GROUPS), data_groups=["x", "gpu", "dta"])


@pytest.mark.parametrize(
    ("groups", "stated"),
    [
        ({"data": ["a"]}, None),
        ({"data_a": ["a"], "data_b": ["b"]}, None),
        (GROUPS, ["gpu", "data_group"]),
        ({"g": ["a"]}, ["g"]),
    ],
)
def test_job_without_trainers_is_an_error(groups, stated):
    """A job without trainers raises an error that shows the table and the setting to change."""
    with pytest.raises(TopologyError, match=r"(?s)^No group trains.*group +instance +role.*LIGHTNING_SM_DATA_GROUPS"):
        Topology.from_job(make_job(groups), data_groups=stated)


def test_unequal_accelerators_are_fine_where_all_hosts_use_as_many():
    """LIGHTNING_SM_DEVICES makes unequal hosts acceptable, up to the GPUs of the smallest host."""
    types = {"one": GPU, "two": FOUR_GPUS}
    groups = {name: [f"algo-{name}"] for name in types}
    assert Topology.from_job(make_job(groups, instance_types=types, devices=1)).num_nodes == 2
    with pytest.raises(TopologyError, match="different numbers of GPUs"):
        Topology.from_job(make_job(groups, instance_types=types, devices=4))


@pytest.mark.parametrize(
    ("types", "stated", "counts"),
    [
        ({"one": GPU, "two": FOUR_GPUS}, None, "one: 1, two: 4"),
        ({"one": CPU, "two": GPU}, [], "one: 0, two: 1"),
        ({"one": "ml.p3.8xlarge", "two": "ml.unknown9.xlarge", "three": "ml.p3.16xlarge"}, None, "one: 4, three: 8"),
    ],
)
def test_unequal_accelerators_are_an_error(types, stated, counts):
    """Lightning numbers ranks by one device count, so training groups must have equal numbers of GPUs."""
    job = make_job({name: [f"algo-{name}"] for name in types}, instance_types=types)
    with pytest.raises(TopologyError, match=rf"(?s)different numbers of GPUs per host \({counts}\).*two +ml\."):
        Topology.from_job(job, data_groups=stated)


@pytest.mark.parametrize("types", [(GPU, "ml.g6e.8xlarge"), (GPU, "ml.g99.xlarge"), (None, FOUR_GPUS), (CPU, CPU)])
def test_equal_or_unknown_accelerators_are_accepted(types):
    """Instance types that are not in the tables count as unknown, not as different."""
    job = make_job({"one": ["a"], "two": ["b"]}, instance_types=dict(zip(("one", "two"), types, strict=True)))
    assert Topology.from_job(job).num_nodes == 2


# ---- ranks and table


def test_ranks_follow_names_as_text():
    """The service sorts hosts as text, so algo-10 precedes algo-2."""
    hosts = [f"algo-{index}" for index in range(1, 13)]
    topology = Topology.from_job(make_job({"g": hosts}, "algo-2"))
    assert topology.trainer_hosts[:4] == ("algo-1", "algo-10", "algo-11", "algo-12")
    assert (topology.node_rank, topology.num_nodes, topology.main_host) == (4, 12, "algo-1")


def test_data_hosts_do_not_count_in_ranks():
    """Only trainer hosts are ranked, even if a data host has the first name."""
    topology = Topology.from_job(make_job({"data": ["algo-1", "algo-3"], "gpu": ["algo-4", "algo-2"]}, "algo-4"))
    assert (topology.main_host, topology.num_nodes, topology.node_rank) == ("algo-2", 2, 1)


def test_table_shows_each_host_with_ranks():
    """The table marks this host, and shows each host's span of ranks if the number of devices is known."""
    types = {"data_group": CPU, "gpu": FOUR_GPUS}
    topology = Topology.from_job(make_job(GROUPS, "algo-2", instance_types=types))
    rows = [re.split(r" {2,}", line.rstrip()) for line in topology.table(devices=4).splitlines()[2:]]
    assert rows == [
        ["algo-1", "gpu", FOUR_GPUS, "trainer", "0", "0-3"],
        ["algo-2*", "gpu", FOUR_GPUS, "trainer", "1", "4-7"],
        ["algo-3", "data_group", CPU, "data", "-", "-"],
    ]
    assert topology.table(devices=1).splitlines()[3].split()[-1] == "1"
    assert topology.table().splitlines()[3].split()[-1] == "?"


def test_a_short_table_has_few_lines_for_many_hosts():
    """The log of a large job starts with a short table; errors show all hosts."""
    groups = {
        "gpu": [f"algo-{index:02}" for index in range(1, 17)],
        "data_group": [f"data-{index}" for index in range(4)],
    }
    topology = Topology.from_job(make_job(groups, "algo-01"))
    rows = topology.table(devices=8, is_short=True).splitlines()[2:]
    assert [re.split(r" {2,}", row)[0] for row in rows] == [
        *("algo-01*", "algo-02", "... 13 more hosts", "algo-16"),
        *("data-0", "data-1", "data-2", "data-3"),
    ]
    assert rows[3].split()[-1] == "120-127"
    assert len(topology.table(devices=8).splitlines()) == 2 + 20


# ---- port


def test_port_can_be_stated():
    """LIGHTNING_SM_MAIN_PORT wins over the derived port."""
    assert Topology.from_job(make_job(GROUPS, main_port=4242)).main_port == 4242


@pytest.mark.parametrize("main_port", [1024, 6023, 6024, 20000, 29999, 65535])
def test_ports_of_a_host_differ(main_port):
    """All ports are valid and unprivileged, and the launchers' port differs from rank 0's and the data hosts'."""
    topology = Topology.from_job(make_job(GROUPS, main_port=main_port))
    assert min(topology.peers_port, topology.data_port) >= 1024
    assert topology.peers_port <= 65535
    assert topology.peers_port not in (main_port, main_port - 10_000)


def test_the_other_ports_lie_below_the_main_port():
    """A security group can allow a range below the main port; if that is too low, the launchers' port lies above it."""
    for main_port, peers, data in ((20000, 15000, 10000), (11024, 6024, 1024), (6024, 1024, 1024), (6023, 11023, 1024)):
        topology = Topology.from_job(make_job(GROUPS, main_port=main_port))
        assert (topology.peers_port, topology.data_port) == (peers, data)


def test_ports_of_jobs_differ_by_name():
    """Jobs on the same network are unlikely to use the same port."""
    ports = [Topology.from_job(make_job(GROUPS, name=f"job-{index}")).main_port for index in range(50)]
    assert len(set(ports)) > 45
    assert all(20000 <= port < 30000 for port in ports)


def test_ports_of_unnamed_jobs_differ_by_hosts():
    """Local mode does not name its jobs, but their host names have distinct suffixes."""
    ports = {Topology.from_job(make_job({"g": [f"algo-1-{suffix}"]})).main_port for suffix in ("ab12c", "d0zia")}
    assert len(ports) == 2
