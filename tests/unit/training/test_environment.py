"""SageMakerEnvironment in this process: ranks, checks, variables, and what it says."""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_sm._lightning import rank_zero_only
from lightning_sm.errors import JobConfigError, TopologyError
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.rank_starter import RANK_VARIABLES
from lightning_sm.job.variables import CONTROL_DIR, RANK_ZERO_PID
from lightning_sm.training import environment as module
from lightning_sm.training.environment import SageMakerEnvironment
from tests.fakes.job_folder import make_job, resource_config, write_job
from tests.unit.job.test_rank_starter import MPI, TORCHRUN

GROUP = {"gpu": ("algo-2", "algo-1")}
MIXED = {"data": ("algo-1",), "gpu": ("algo-3", "algo-2")}
ADDRESSES = {"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"}


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch):
    """No rank variables, no environment before this one, and Lightning's rank put back afterwards."""
    for name in (*RANK_VARIABLES, *TORCHRUN, *MPI, RANK_ZERO_PID.name, "SM_CURRENT_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(SageMakerEnvironment, "_consulted", False)
    monkeypatch.setattr(SageMakerEnvironment, "_announced", False)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    atexit.unregister(module.report_if_alone)
    atexit.unregister(module._leave)


def _environment(host="algo-1", groups=GROUP, *, variables=None, **facts):
    os.environ.update(variables or {})
    return SageMakerEnvironment(make_job(groups, host, **facts))


def _mpi(rank, devices=1, size=2):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % devices),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(devices),
    }


def _torchrun(node_rank, devices=2, size=4):
    return {**TORCHRUN, "GROUP_RANK": str(node_rank), "LOCAL_WORLD_SIZE": str(devices), "WORLD_SIZE": str(size)}


def test_no_job_is_an_error_that_says_what_to_leave_out(tmp_path, monkeypatch):
    """Off SageMaker detect() is false, and building the environment names both places where a job would be."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    for name in ("SM_HOSTS", "SM_RESOURCE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert not SageMakerEnvironment.detect()
    with pytest.raises(JobConfigError, match=r"not a SageMaker host: .*resourceconfig\.json .* nor SM_HOSTS"):
        SageMakerEnvironment()


def test_job_is_read_from_this_host(tmp_path, monkeypatch):
    """Without arguments the facts come from the job's files."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(write_job(tmp_path, resource_config(GROUP, "algo-2"))))
    assert SageMakerEnvironment.detect()
    assert SageMakerEnvironment().node_rank() == 1


def test_malformed_job_is_an_error_of_detect_too(tmp_path, monkeypatch):
    """A broken file does not count as no job."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(write_job(tmp_path, "{")))
    with pytest.raises(JobConfigError, match=r"resourceconfig\.json: not valid JSON"):
        SageMakerEnvironment.detect()


@pytest.mark.parametrize("variables", [{}, _torchrun(0), _mpi(0)], ids=["plain", "torchrun", "mpirun"])
def test_data_host_is_refused_whoever_started_it(variables):
    """A data host has no rank, not even one that a launcher gave it (SDK v2 starts torchrun in every group)."""
    with pytest.raises(TopologyError, match=r"(?s)Host 'algo-1' serves data and has no rank.*algo-1\* +data"):
        _environment("algo-1", MIXED, variables=variables)


def test_what_is_said_of_an_unused_environment_is_left_to_the_launcher(caplog, monkeypatch, tmp_path):
    """A script that failed before its Trainer was made has another reason: the launcher, if any, says this or not."""
    monkeypatch.setattr(logging.getLogger("lightning_sm"), "propagate", True)
    monkeypatch.setenv(CONTROL_DIR.name, str(tmp_path))
    module.report_if_alone(_environment().topology)
    (said,) = ControlFolder(tmp_path).warnings()
    assert "trained alone" in said
    assert said not in caplog.messages
    monkeypatch.delenv(CONTROL_DIR.name)
    monkeypatch.setattr(SageMakerEnvironment, "_consulted", False)
    module.report_if_alone(_environment().topology)
    assert said in caplog.messages


def test_data_groups_can_be_named():
    """The argument decides which groups serve data, and their hosts count in no rank."""
    environment = SageMakerEnvironment(make_job({"a": ("algo-1",), "b": ("algo-2",)}, "algo-2", data_groups=("a",)))
    assert (environment.num_nodes, environment.node_rank()) == (1, 0)
    assert environment.topology.data_hosts == ("algo-1",)


def test_ranks_of_a_plain_process():
    """Node ranks follow the sorted hosts of the training groups; Lightning decides on the rest."""
    environment = _environment("algo-3", MIXED)
    assert (environment.num_nodes, environment.devices) == (2, None)
    assert (environment.node_rank(), environment.local_rank(), environment.global_rank()) == (1, 0, 1)
    assert environment.world_size() == 1
    assert not environment.creates_processes_externally
    environment.set_global_rank(2)
    environment.set_world_size(4)
    assert (environment.global_rank(), environment.world_size()) == (2, 4)


def test_stated_devices_count_in_the_rank_from_the_start():
    """With LIGHTNING_SM_DEVICES the global rank is right before the Trainer is made."""
    environment = _environment("algo-2", devices=4)
    assert environment.devices == 4
    assert environment.global_rank() == 4


def test_ranks_of_a_child_that_lightning_started():
    """Lightning's child knows its local rank, and starts no processes itself."""
    environment = _environment("algo-2", variables={RANK_ZERO_PID.name: str(os.getppid()), "LOCAL_RANK": "1"})
    assert (environment.node_rank(), environment.local_rank()) == (1, 1)
    assert environment.creates_processes_externally


def test_ranks_under_torchrun():
    """All ranks, the main address and the port are torchrun's."""
    environment = _environment("algo-1", variables=_torchrun(1))
    assert (environment.node_rank(), environment.local_rank(), environment.global_rank()) == (1, 1, 3)
    assert (environment.world_size(), environment.devices) == (4, 2)
    assert (environment.main_address, environment.main_port) == ("algo-2", 7777)
    assert environment.creates_processes_externally
    assert os.environ["LOCAL_RANK"] == "1"


def test_ranks_under_mpirun():
    """All ranks are mpirun's."""
    environment = _environment("algo-2", variables=_mpi(3, devices=2, size=4))
    assert (environment.node_rank(), environment.local_rank(), environment.global_rank()) == (1, 1, 3)
    assert (environment.world_size(), environment.devices) == (4, 2)
    assert environment.creates_processes_externally


def test_lightning_logs_from_rank_zero_only():
    """From the start, processes of other hosts are silent where Lightning says things once."""
    _environment("algo-2")
    assert rank_zero_only.rank == 1


def test_environment_survives_pickling():
    """A worker that ddp_spawn starts reads its local rank again."""
    pickled = pickle.dumps(_environment("algo-2", addresses=ADDRESSES))
    environment = pickle.loads(pickled)  # noqa: S301 - made one line above
    os.environ["LOCAL_RANK"] = "1"
    assert (environment.node_rank(), environment.local_rank()) == (1, 1)
    environment.set_global_rank(3)
    environment.set_world_size(4)
    assert environment.main_address == "127.0.0.2"


def test_stray_variables_are_removed_and_named_once(caplog):
    """Rank variables of unknown origin are gone for every library; what Lightning sets later is left alone."""
    _environment(variables={"NODE_RANK": "7", "RANK": "5"})
    assert caplog.messages == ["Ignoring NODE_RANK=7, RANK=5: not set by SageMaker or by the launcher of this process."]
    assert not {"NODE_RANK", "RANK"} & set(os.environ)
    environment = _environment(variables={"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.2"})  # Lightning, before a fit
    assert len(caplog.messages) == 1
    assert os.environ["MASTER_ADDR"] == "127.0.0.2"
    assert environment.creates_processes_externally


def test_stray_variables_under_mpirun_are_removed_once(caplog):
    """Under mpirun, too, what the first environment's fit set is no stray to the second."""
    _environment(variables={**_mpi(0), "WORLD_SIZE": "9"})
    _environment(variables={"MASTER_ADDR": "127.0.0.2"})
    assert len(caplog.messages) == 1
    assert "WORLD_SIZE" not in os.environ
    assert os.environ["MASTER_ADDR"] == "127.0.0.2"


def test_main_port_is_stated_or_derived_from_the_job():
    """An argument comes before LIGHTNING_SM_MAIN_PORT, and that before the port of the job."""
    assert SageMakerEnvironment(make_job(GROUP, main_port=12345), main_port=23456).main_port == 23456
    assert SageMakerEnvironment(make_job(GROUP, main_port=12345)).main_port == 12345
    derived = {SageMakerEnvironment(make_job(GROUP, host, name="job")).main_port for host in GROUP["gpu"]}
    assert len(derived) == 1


def test_main_port_of_torchrun_comes_first():
    """The agent of torchrun listens on its own port, so that no other can be used."""
    os.environ.update(_torchrun(0))
    assert SageMakerEnvironment(make_job(GROUP), main_port=23456).main_port == 7777


def test_main_port_under_mpirun_needs_no_job_name():
    """A host whose mpirun session lacks TRAINING_JOB_NAME agrees with one that has it."""
    first = _environment("algo-1", variables=_mpi(0), name="job").main_port
    assert _environment("algo-2", variables=_mpi(1)).main_port == first


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
    """Rank 1 of two hosts finds the host of rank 0."""
    if stated is not None:
        os.environ["SM_CURRENT_HOST"] = stated
    os.environ.update(_mpi(1))
    job = replace(make_job(GROUP, host, addresses=ADDRESSES), source=source)
    assert SageMakerEnvironment(job).main_address == expected


@pytest.mark.parametrize("stated", [None, "algo-1"])
def test_unknown_main_host_under_mpirun_is_an_error(stated):
    """Where mpirun's order differs from ours and nothing tells rank 0's host, the error says what would."""
    if stated is not None:
        os.environ["SM_CURRENT_HOST"] = stated
    with pytest.raises(TopologyError, match=r"(?s)'algo-1' node rank 1.*algo-1\*.*-x SM_CURRENT_HOST.*-m mpi4py"):
        _environment("algo-1", variables=_mpi(1))


@pytest.mark.parametrize(("size", "expected"), [(2, "127.0.0.3"), (1, "127.0.0.2")])
def test_main_host_is_told_by_a_loaded_mpi4py_of_the_same_mpi(monkeypatch, size, expected):
    """What rank 0 sends is taken; an mpi4py of another MPI library, which sees a world of one, is not asked."""
    world = SimpleNamespace(Get_size=lambda: size, bcast=lambda _, root: f"algo-{2 - root}")
    monkeypatch.setitem(module.sys.modules, "mpi4py", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(module.sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=world))
    assert _environment("algo-2", variables=_mpi(1), addresses=ADDRESSES).main_address == expected


@pytest.mark.parametrize("host", ["algo-1", "algo-2"])
@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        (_torchrun(0, size=2), "torchrun set world size 2 and local world size 2, but the job needs world size 4"),
        (_mpi(0, size=3), "mpirun set world size 3 and local world size 1, but the job needs world size 2"),
    ],
)
def test_launcher_that_does_not_span_the_cluster_is_refused(host, variables, sizes):
    """A launcher with fewer or more processes than the hosts make is an error with the table."""
    with pytest.raises(TopologyError, match=rf"(?s){sizes}: .*{host}\*"):
        _environment(host, variables=variables)


def test_torchrun_in_each_of_two_training_groups_is_refused_with_the_hyperparameter_that_joins_them():
    """Where the toolkit started a torchrun in each group, the error says how to tell it that both train together."""
    groups = {"one": ("algo-1",), "two": ("algo-3", "algo-2")}
    advice = r'hyperparameters=\{"sagemaker_distribution_instance_groups": \["one", "two"\]\}'
    with pytest.raises(TopologyError, match=rf"(?s)set world size 4 .* = 3 x .*algo-2\*.*{advice}"):
        _environment("algo-2", groups, variables=_torchrun(0))
    with pytest.raises(TopologyError) as error:  # two of three hosts, of both groups: something else went wrong
        _environment("algo-1", groups, variables=_torchrun(0))
    assert "sagemaker_distribution_instance_groups" not in str(error.value)


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
    """What Lightning computed from wrong settings is an error with the table, and not a hang."""
    environment = _environment(host)
    environment.set_global_rank(rank)
    expected = rf"(?s)gives world size {size} and rank {rank} .*\(trainer hosts: 2; .*{host}\*.*num_nodes=2"
    with pytest.raises(TopologyError, match=expected):
        environment.set_world_size(size)


@pytest.mark.parametrize("variables", [_torchrun(0), _mpi(0, devices=2, size=4)], ids=["torchrun", "mpirun"])
def test_world_size_must_be_that_of_the_launcher(variables):
    """A multiple of the hosts is not enough where a launcher set the number of processes."""
    with pytest.raises(TopologyError, match="trainer hosts: 2, processes on each: 2;"):
        _environment(variables=variables).set_world_size(2)


def test_settings_that_fit_are_accepted():
    """The right num_nodes passes with any number of devices, unless that is stated."""
    _environment().validate_settings(num_devices=8, num_nodes=2)
    _environment(devices=4).validate_settings(num_devices=4, num_nodes=2)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_wrong_num_nodes_is_refused(num_nodes):
    """The error has both numbers, where the right one comes from, and the table."""
    number = rf"num_nodes={num_nodes}\) does not match the number of trainer hosts in the job, 2"
    expected = rf"(?s){number} .*resourceconfig.*algo-1\*.*num_nodes=2"
    with pytest.raises(TopologyError, match=expected):
        _environment().validate_settings(num_devices=1, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("variables", "facts", "set_by"),
    [
        (_torchrun(0), {}, "torchrun"),
        (_mpi(0, 2, 4), {}, "mpirun"),
        ({}, {"devices": 2}, r"LIGHTNING_SM_DEVICES \(lightning-sm local --devices\)"),
    ],
)
def test_wrong_devices_are_refused(variables, facts, set_by):
    """The error names who set the number of processes."""
    environment = _environment(variables=variables, **facts)
    with pytest.raises(TopologyError, match=rf"devices=3\) does not match .* on each host, 2, set by {set_by}"):
        environment.validate_settings(num_devices=3, num_nodes=2)


def test_existing_interface_is_exported():
    """NCCL and Gloo are pointed at the job's interface; what the user set stays."""
    os.environ["NCCL_SOCKET_IFNAME"] = "^docker0"
    _environment(network_interface="lo").set_world_size(2)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_interface_that_does_not_exist_is_neither_exported_nor_kept(caplog):
    """An interface that this host has not is dropped with a warning, and reported so; the user's own is kept."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    os.environ.update({"NCCL_SOCKET_IFNAME": "ethwe", "GLOO_SOCKET_IFNAME": "mine"})
    _environment(network_interface="ethwe").set_world_size(2)
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    warning, report = caplog.messages
    assert warning == "Ignoring NCCL_SOCKET_IFNAME=ethwe: this host has no such interface."
    assert "interface ethwe (not on this host)" in report


def test_rank_variables_wait_until_lightning_has_started_the_local_ranks():
    """A local rank that Lightning is about to start must not inherit the rank of the process that starts it."""
    environment = _environment("algo-2")
    environment.set_global_rank(2)
    environment.set_world_size(4)  # Lightning makes the Trainer
    assert not set(RANK_VARIABLES) & set(os.environ)
    os.environ["LOCAL_RANK"] = "0"  # it has started the others
    environment.set_world_size(4)
    assert _ranks() == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "mark"),
    [
        ({}, ""),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "8"}, ""),  # stray
        ({RANK_ZERO_PID.name: str(os.getppid()), "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, "[rank5]: "),
        ({**_torchrun(1), "LOCAL_RANK": "1"}, "[rank3]: "),
        (_mpi(3, devices=2, size=4), "[rank3]: "),
        (_mpi(1), ""),
    ],
)
def test_one_of_several_local_ranks_marks_its_warnings(variables, mark):
    """With the rank that it will have, before the Trainer exists; of Lightning, only those that it has started."""
    _environment("algo-2", variables=variables)
    assert warnings.formatwarning("soon", UserWarning, "x.py", 7, "f()").startswith(f"{mark}x.py:7: UserWarning: soon")


def test_rank_variables_under_mpirun():
    """Under mpirun, which has other names for all of them, they are set, too."""
    environment = _environment("algo-2", variables=_mpi(3, devices=2, size=4))
    environment.set_world_size(4)
    assert _ranks() == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_rank_variables_of_one_process():
    """A job of one process has them, too, but for the one that would keep a later Trainer from starting local ranks."""
    environment = _environment("algo-1", {"gpu": ("algo-1",)})
    environment.announce(devices=1)
    assert _ranks() == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert not environment.creates_processes_externally


def _ranks():
    return {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}


def test_job_without_an_interface_exports_none(monkeypatch):
    """Without a named interface the libraries choose."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    _environment(network_interface=None).set_world_size(2)
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(os.environ)


def test_table_is_printed_by_rank_zero_once(caplog):
    """One report for all environments and Trainers of the process."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    for _ in range(2):
        environment = _environment("algo-2", MIXED, name="job")
        environment.set_world_size(4)
        environment.set_world_size(4)
    (report,) = caplog.messages
    rows = [line.split() for line in report.splitlines()]
    assert rows[2:5] == [
        ["algo-2*", "gpu", "-", "trainer", "0", "0-1"],
        ["algo-3", "gpu", "-", "trainer", "1", "2-3"],
        ["algo-1", "data", "-", "data", "-", "-"],
    ]
    assert rows[5][:7] == ["job", "job,", "one", "process", "per", "host,", "main"]
    assert f"main address algo-2:{environment.main_port}, interface (none)" in report


def test_other_ranks_print_no_table(caplog):
    """Only rank 0 reports."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    _environment("algo-2").set_world_size(2)
    assert caplog.messages == []


def test_order_of_a_launcher_that_differs_is_told(caplog):
    """Where torchrun orders the hosts differently from the table, each host says so, and where rank 0 is."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    _environment("algo-2", variables={**_torchrun(0), "LOCAL_RANK": "0"}).set_world_size(4)
    first, second = caplog.messages
    assert first == "Host algo-2 has node rank 0: torchrun orders the hosts differently from the table of hosts."
    assert "torchrun, main address algo-2:7777" in second


def test_addresses_stand_for_names_that_no_resolver_knows(tmp_path, monkeypatch):
    """The main address is taken from LIGHTNING_SM_HOST_ADDRESSES where that has the main host."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(write_job(tmp_path, resource_config(GROUP, "algo-2"))))
    monkeypatch.setenv("LIGHTNING_SM_HOST_ADDRESSES", json.dumps(ADDRESSES))
    assert SageMakerEnvironment().main_address == "127.0.0.2"
