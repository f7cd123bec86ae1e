"""SageMakerEnvironment in this process: ranks and checks, without side effects."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_sm.errors import JobConfigError, TopologyError
from lightning_sm.job.variables import RANK_ZERO_PID
from lightning_sm.training.environment import SageMakerEnvironment
from tests.fakes.environments import GROUP, MIXED, make_environment, mpi, torchrun
from tests.fakes.job_folder import make_job, resource_config, write_job

pytestmark = pytest.mark.usefixtures("fresh_process")

ADDRESSES = {"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"}


def test_no_job_is_an_error_that_says_what_to_leave_out(tmp_path, monkeypatch):
    """Outside SageMaker, detect() is False, and the error from the constructor names both sources of a job."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    for name in ("SM_HOSTS", "SM_RESOURCE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert not SageMakerEnvironment.detect()
    with pytest.raises(JobConfigError, match=r"not a SageMaker host: .*resourceconfig\.json .* nor SM_HOSTS"):
        SageMakerEnvironment()


def test_job_is_read_from_this_host(tmp_path, monkeypatch):
    """By default, the job is read from this host's files."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(write_job(tmp_path, resource_config(GROUP, "algo-2"))))
    assert SageMakerEnvironment.detect()
    assert SageMakerEnvironment().node_rank() == 1


def test_malformed_job_is_an_error_of_detect_too(tmp_path, monkeypatch):
    """detect() raises an error for a malformed file instead of returning False."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(write_job(tmp_path, "{")))
    with pytest.raises(JobConfigError, match=r"resourceconfig\.json: not valid JSON"):
        SageMakerEnvironment.detect()


@pytest.mark.parametrize("variables", [{}, torchrun(0), mpi(0)], ids=["plain", "torchrun", "mpirun"])
def test_data_host_is_refused_whoever_started_it(variables):
    """A data host has no rank, even if a launcher set one (SDK v2 starts torchrun in every group)."""
    with pytest.raises(TopologyError, match=r"(?s)Host 'algo-1' serves data and has no rank.*algo-1\* +data"):
        make_environment("algo-1", MIXED, variables=variables)


_STATES = """
import atexit, json, logging, os, sys, warnings
from lightning_sm import SageMakerEnvironment
from lightning_sm._lightning import rank_zero_only

def state():
    loggers = [logging.getLogger(name) for name in (None, "lightning_sm", "pytorch_lightning", "lightning_fabric")]
    return {
        "os.environ": dict(os.environ),
        "loggers": [(one.level, one.propagate, list(one.handlers), list(one.filters)) for one in loggers],
        "sys.excepthook": sys.excepthook,
        "warnings.formatwarning": warnings.formatwarning,
        "warnings.filters": list(warnings.filters),
        "atexit": atexit._ncallbacks(),
        "rank_zero_only.rank": rank_zero_only.rank,
        "sys.meta_path": list(sys.meta_path),
    }

for variables in json.loads(sys.argv[1]):
    variables = {name: value.replace("PARENT", str(os.getppid())) for name, value in variables.items()}
    os.environ.update(variables)
    before = state()
    environment = SageMakerEnvironment()
    after = state()
    print(environment.start.launcher.name, sorted(name for name in before if before[name] != after[name]))
    for name in variables:
        del os.environ[name]
"""


def test_building_it_changes_nothing_in_the_process(tmp_path):
    """Creating the environment changes no variables, logging, hooks, exit handlers or Lightning rank."""
    base = write_job(tmp_path, resource_config(GROUP, "algo-2"))
    starts = {
        "PLAIN": {"NODE_RANK": "7", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.1"},  # stray
        "LIGHTNING": {RANK_ZERO_PID.name: "PARENT", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        "TORCHRUN": torchrun(1),
        "MPI": mpi(1),
    }
    command = [sys.executable, "-c", _STATES, json.dumps([{}, *starts.values()])]
    env = {**os.environ, "SAGEMAKER_BASE_DIR": str(base)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.splitlines() == [f"{launcher} []" for launcher in ("PLAIN", *starts)], ended.stderr


def test_what_lightning_sets_is_believed_in_a_process_that_is_not_prepared():
    """In an unprepared process, variables that Lightning sets for local ranks and a second Trainer are accepted."""
    port = str(make_environment("algo-2").main_port)
    of_lightning = {"LOCAL_RANK": "1", "MASTER_PORT": port, "NODE_RANK": "1", "WORLD_SIZE": "4"}
    environment = make_environment("algo-2", variables=of_lightning)
    environment.set_global_rank(3)
    environment.set_world_size(4)
    assert environment.creates_processes_externally
    assert environment.world_size() == 4


def test_data_groups_can_be_named():
    """The argument determines the data groups, whose hosts count in no rank."""
    environment = SageMakerEnvironment(make_job({"a": ("algo-1",), "b": ("algo-2",)}, "algo-2", data_groups=("a",)))
    assert (environment.num_nodes, environment.node_rank()) == (1, 0)
    assert environment.topology.data_hosts == ("algo-1",)


def test_ranks_of_a_plain_process():
    """Node ranks follow the sorted hosts of the training groups; Lightning sets the other ranks."""
    environment = make_environment("algo-3", MIXED)
    assert (environment.num_nodes, environment.devices) == (2, None)
    assert (environment.node_rank(), environment.local_rank(), environment.global_rank()) == (1, 0, 1)
    assert environment.world_size() == 1
    assert not environment.creates_processes_externally
    environment.set_global_rank(2)
    environment.set_world_size(4)
    assert (environment.global_rank(), environment.world_size()) == (2, 4)


def test_stated_devices_count_in_the_rank_from_the_start():
    """With LIGHTNING_SM_DEVICES, the global rank is correct before the Trainer is created."""
    environment = make_environment("algo-2", devices=4)
    assert environment.devices == 4
    assert environment.global_rank() == 4


def test_ranks_of_a_child_that_lightning_started():
    """A child that Lightning started has its local rank, and starts no processes itself."""
    environment = make_environment("algo-2", variables={RANK_ZERO_PID.name: str(os.getppid()), "LOCAL_RANK": "1"})
    assert (environment.node_rank(), environment.local_rank()) == (1, 1)
    assert environment.creates_processes_externally


def test_ranks_under_torchrun():
    """Ranks, main address and port come from torchrun."""
    environment = make_environment("algo-1", variables=torchrun(1))
    assert (environment.node_rank(), environment.local_rank(), environment.global_rank()) == (1, 1, 3)
    assert (environment.world_size(), environment.devices) == (4, 2)
    assert (environment.main_address, environment.main_port) == ("algo-2", 7777)
    assert environment.creates_processes_externally
    assert os.environ["LOCAL_RANK"] == "1"


def test_ranks_under_mpirun():
    """Ranks come from mpirun."""
    environment = make_environment("algo-2", variables=mpi(3, devices=2, size=4))
    assert (environment.node_rank(), environment.local_rank(), environment.global_rank()) == (1, 1, 3)
    assert (environment.world_size(), environment.devices) == (4, 2)
    assert environment.creates_processes_externally


def test_environment_survives_pickling():
    """A worker of ddp_spawn reads its local rank anew."""
    parents = make_environment("algo-2", addresses=ADDRESSES)
    parents.set_global_rank(2)
    parents.set_world_size(4)  # as Lightning does in Trainer()
    environment = pickle.loads(pickle.dumps(parents))  # noqa: S301 - made here
    os.environ["LOCAL_RANK"] = "1"
    assert (environment.node_rank(), environment.local_rank()) == (1, 1)
    environment.set_global_rank(3)
    environment.set_world_size(4)
    assert environment.main_address == "127.0.0.2"


def test_main_port_is_stated_or_derived_from_the_job():
    """LIGHTNING_SM_MAIN_PORT takes precedence over the port derived from the job's name."""
    assert SageMakerEnvironment(make_job(GROUP, main_port=12345)).main_port == 12345
    derived = {SageMakerEnvironment(make_job(GROUP, host, name="job")).main_port for host in GROUP["gpu"]}
    assert len(derived) == 1


def test_main_port_of_torchrun_comes_first():
    """The port of torchrun takes precedence: its agent already listens there."""
    os.environ.update(torchrun(0))
    assert SageMakerEnvironment(make_job(GROUP, main_port=23456)).main_port == 7777


def test_main_port_under_mpirun_needs_no_job_name():
    """A host whose mpirun session lacks TRAINING_JOB_NAME uses the same port as one that has it."""
    first = make_environment("algo-1", variables=mpi(0), name="job").main_port
    assert make_environment("algo-2", variables=mpi(1)).main_port == first


@pytest.mark.parametrize(
    ("host", "stated", "source", "expected"),
    [
        pytest.param("algo-1", "algo-2", "resourceconfig.json", "127.0.0.3", id="variable of rank 0's host"),
        pytest.param("algo-2", "algo-1", "resourceconfig.json", "127.0.0.2", id="variable in sorted order"),
        pytest.param("algo-2", "algo-2", "SM_HOSTS/SM_CURRENT_HOST", "127.0.0.3", id="no file, all from rank 0"),
        pytest.param("algo-2", None, "resourceconfig.json", "127.0.0.2", id="no variable, sorted order"),
        pytest.param("algo-2", "algo-2", "resourceconfig.json", "127.0.0.2", id="own variable, sorted order"),
        pytest.param("algo-2", "other", "resourceconfig.json", "127.0.0.2", id="variable of another job"),
    ],
)
def test_main_host_under_mpirun_without_mpi4py(host, stated, source, expected):
    """Rank 1 of two hosts determines the host of rank 0."""
    if stated is not None:
        os.environ["SM_CURRENT_HOST"] = stated
    os.environ.update(mpi(1))
    job = replace(make_job(GROUP, host, addresses=ADDRESSES), source=source, has_own_file=not source.startswith("SM_"))
    assert SageMakerEnvironment(job).main_address == expected


@pytest.mark.parametrize("stated", [None, "algo-1"])
def test_unknown_main_host_under_mpirun_is_an_error(stated):
    """If mpirun's order differs from the sorted one and nothing tells rank 0's host, the error lists the remedies."""
    if stated is not None:
        os.environ["SM_CURRENT_HOST"] = stated
    with pytest.raises(TopologyError, match=r"(?s)'algo-1' node rank 1.*algo-1\*.*-x SM_CURRENT_HOST.*-m mpi4py"):
        make_environment("algo-1", variables=mpi(1))


@pytest.mark.parametrize(("size", "expected"), [(2, "127.0.0.3"), (1, "127.0.0.2")])
def test_main_host_is_told_by_a_loaded_mpi4py_of_the_same_mpi(monkeypatch, size, expected):
    """A loaded mpi4py provides rank 0's host, unless it belongs to another MPI library and sees a world of size 1."""
    world = SimpleNamespace(Get_size=lambda: size, bcast=lambda _, root: f"algo-{2 - root}")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=world))
    assert make_environment("algo-2", variables=mpi(1), addresses=ADDRESSES).main_address == expected


@pytest.mark.parametrize("host", ["algo-1", "algo-2"])
@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        (torchrun(0, size=2), "torchrun set world size 2 and local world size 2, but the job needs world size 4"),
        (mpi(0, size=3), "mpirun set world size 3 and local world size 1, but the job needs world size 2"),
    ],
)
def test_launcher_that_does_not_span_the_cluster_is_refused(host, variables, sizes):
    """A launcher with too few or too many processes for the hosts is an error that shows the table."""
    with pytest.raises(TopologyError, match=rf"(?s){sizes}: .*{host}\*"):
        make_environment(host, variables=variables)


def test_torchrun_in_each_of_two_training_groups_is_refused_with_the_hyperparameter_that_joins_them():
    """One torchrun per training group, as the toolkit starts them, is refused; the error gives the remedy."""
    groups = {"one": ("algo-1",), "two": ("algo-3", "algo-2")}
    with pytest.raises(
        TopologyError, match=r"(?s)set world size 4 .* = 3 x .*algo-2\*.*sagemaker_distribution_instance_groups"
    ):
        make_environment("algo-2", groups, variables=torchrun(0))


@pytest.mark.parametrize(
    ("host", "rank", "size"),
    [
        pytest.param("algo-1", 0, 3, id="num_nodes=3"),
        pytest.param("algo-1", 0, 1, id="num_nodes=1, ddp"),
        pytest.param("algo-2", 1, 4, id="num_nodes=4"),
        pytest.param("algo-2", 2, 2, id="num_nodes=1, devices=2"),
    ],
)
def test_world_size_that_does_not_fit_is_refused(host, rank, size):
    """A world size from wrong settings is an error that shows the table instead of a hang."""
    environment = make_environment(host)
    environment.set_global_rank(rank)
    expected = rf"(?s)gives world size {size} and rank {rank} .*\(trainer hosts: 2; .*{host}\*.*num_nodes=2"
    with pytest.raises(TopologyError, match=expected):
        environment.set_world_size(size)


@pytest.mark.parametrize("variables", [torchrun(0), mpi(0, devices=2, size=4)], ids=["torchrun", "mpirun"])
def test_world_size_must_be_that_of_the_launcher(variables):
    """The world size must equal the launcher's, not just be a multiple of the number of hosts."""
    with pytest.raises(TopologyError, match="trainer hosts: 2, processes on each: 2;"):
        make_environment(variables=variables).set_world_size(2)


def test_settings_that_fit_are_accepted():
    """The right num_nodes is accepted with any number of devices unless that is set."""
    make_environment().validate_settings(num_devices=8, num_nodes=2)
    make_environment(devices=4).validate_settings(num_devices=4, num_nodes=2)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_wrong_num_nodes_is_refused(num_nodes):
    """The error shows both numbers, the source of the right one, and the table."""
    number = rf"num_nodes={num_nodes} does not match the number of trainer hosts in the job, 2"
    expected = rf"(?s){number} .*resourceconfig.*algo-1\*.*num_nodes=2"
    with pytest.raises(TopologyError, match=expected):
        make_environment().validate_settings(num_devices=1, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("variables", "facts", "set_by"),
    [
        (torchrun(0), {}, "torchrun"),
        (mpi(0, 2, 4), {}, "mpirun"),
        ({}, {"devices": 2}, r"LIGHTNING_SM_DEVICES \(lightning-sm local --devices\)"),
    ],
)
def test_wrong_devices_are_refused(variables, facts, set_by):
    """The error names what set the number of processes."""
    environment = make_environment(variables=variables, **facts)
    with pytest.raises(TopologyError, match=rf"devices=3 does not match .* on each host, 2, set by {set_by}"):
        environment.validate_settings(num_devices=3, num_nodes=2)


def test_addresses_stand_for_names_that_no_resolver_knows(tmp_path, monkeypatch):
    """The main address comes from LIGHTNING_SM_HOST_ADDRESSES if that contains the main host."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(write_job(tmp_path, resource_config(GROUP, "algo-2"))))
    monkeypatch.setenv("LIGHTNING_SM_HOST_ADDRESSES", json.dumps(ADDRESSES))
    assert SageMakerEnvironment().main_address == "127.0.0.2"
