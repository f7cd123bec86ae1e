"""What prepare_process changes in a process, and what it logs."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys

import pytest

from lightning_sm._lightning import rank_zero_only
from lightning_sm._untested import GPUS
from lightning_sm.job.failure_file import read_failures
from lightning_sm.job.rank_starter import RANK_VARIABLES
from lightning_sm.job.variables import CONTROL_DIR, RANK_ZERO_PID
from lightning_sm.training import group_exit
from lightning_sm.training.process import PreparedProcess, prepare_process, rank_of_several
from tests.fakes.environments import MIXED, make_environment, mpi, torchrun
from tests.fakes.process_state import forget_preparation

pytestmark = pytest.mark.usefixtures("fresh_process")


@pytest.fixture
def exit_handlers(monkeypatch):
    """The functions registered with atexit during the test, of which atexit has no public list."""
    handlers = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(
        atexit, "unregister", lambda gone: handlers.__setitem__(slice(None), [one for one in handlers if one != gone])
    )
    return handlers


def _prepared(*args, **kwargs):
    """The environment of a prepared process."""
    environment = make_environment(*args, **kwargs)
    prepare_process(environment)
    return environment


def test_an_exception_that_ends_the_process_is_reported_with_its_rank(monkeypatch, tmp_path, exit_handlers):
    """The exception is reported with its rank for the launcher, and the rank exits without waiting for the others."""
    monkeypatch.setenv(CONTROL_DIR.name, str(tmp_path))
    prepare_process(make_environment("algo-2", variables={**torchrun(1), "LOCAL_RANK": "1"}))
    assert group_exit._leave in exit_handlers
    sys.excepthook(ValueError, ValueError("x"), None)
    assert group_exit._leave not in exit_handlers
    (failure,) = read_failures(tmp_path).values()
    assert (failure.rank, failure.lines) == (3, ("ValueError: x",))


def test_log_lines_are_shown(monkeypatch):
    """The package's messages are shown from INFO upwards."""
    package = logging.getLogger("lightning_sm")
    monkeypatch.setattr(package, "level", logging.NOTSET)
    _prepared()
    assert package.level == logging.INFO


def test_lightning_logs_from_rank_zero_only():
    """Processes on other hosts are silent from the start where Lightning logs on rank 0 only."""
    _prepared("algo-2")
    assert rank_zero_only.rank == 1


def test_stray_variables_are_removed_and_named_once(caplog):
    """Rank variables of unknown origin are removed for all libraries; ones that Lightning sets later are kept."""
    _prepared(variables={"NODE_RANK": "7", "RANK": "5"})
    assert caplog.messages == ["Ignoring NODE_RANK=7, RANK=5: not set by SageMaker or by the launcher of this process."]
    assert not {"NODE_RANK", "RANK"} & set(os.environ)
    environment = _prepared(variables={"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.2"})  # as Lightning does before a fit
    assert len(caplog.messages) == 1
    assert os.environ["MASTER_ADDR"] == "127.0.0.2"
    assert environment.creates_processes_externally


def test_stray_variables_under_mpirun_are_removed_once(caplog):
    """Under mpirun, the second environment keeps what the first one's fit has set."""
    _prepared(variables={**mpi(0), "WORLD_SIZE": "9"})
    _prepared(variables={"MASTER_ADDR": "127.0.0.2"})
    assert len(caplog.messages) == 1
    assert "WORLD_SIZE" not in os.environ
    assert os.environ["MASTER_ADDR"] == "127.0.0.2"


def test_existing_interface_is_exported():
    """NCCL and Gloo use the job's network interface, unless the user has set another."""
    os.environ["NCCL_SOCKET_IFNAME"] = "^docker0"
    _prepared(network_interface="lo").set_world_size(2)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_interface_that_does_not_exist_is_neither_exported_nor_kept(caplog):
    """An interface that this host lacks is dropped with a warning and marked in the report; the user's is kept."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    os.environ.update({"NCCL_SOCKET_IFNAME": "ethwe", "GLOO_SOCKET_IFNAME": "mine"})
    _prepared(network_interface="ethwe").set_world_size(2)
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    warning, report = caplog.messages
    assert warning == "Ignoring NCCL_SOCKET_IFNAME=ethwe: this host has no such interface."
    assert "interface ethwe (not on this host)" in report


def test_rank_variables_wait_until_lightning_has_started_the_local_ranks():
    """Rank variables are set only after Lightning has started the local ranks, which would otherwise inherit them."""
    environment = _prepared("algo-2")
    environment.set_global_rank(2)
    environment.set_world_size(4)  # as Lightning does in Trainer()
    assert not set(RANK_VARIABLES) & set(os.environ)
    os.environ["LOCAL_RANK"] = "0"  # Lightning has started the other local ranks
    environment.set_world_size(4)
    assert _ranks() == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "8"}, None),  # stray
        ({RANK_ZERO_PID.name: str(os.getppid()), "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, 5),
        ({**torchrun(1), "LOCAL_RANK": "1"}, 3),
        (mpi(3, devices=2, size=4), 3),
        (mpi(1), None),
    ],
)
def test_one_of_several_local_ranks_knows_its_rank(variables, rank):
    """A process with local peers has its rank before the Trainer exists; with Lightning, only those that it started."""
    assert rank_of_several(_prepared("algo-2", variables=variables)) == rank


def test_rank_variables_under_mpirun():
    """Rank variables are set under mpirun, which names all of them differently."""
    environment = _prepared("algo-2", variables=mpi(3, devices=2, size=4))
    environment.set_world_size(4)
    assert _ranks() == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_rank_variables_of_one_process():
    """A single process has all rank variables but LOCAL_RANK, which would keep a later Trainer from starting ranks."""
    environment = _prepared("algo-1", {"gpu": ("algo-1",)})
    PreparedProcess.current.announce(environment, devices=1)
    assert _ranks() == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert not environment.creates_processes_externally


def test_job_without_an_interface_exports_none(monkeypatch):
    """Without a named network interface, the libraries choose one."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    _prepared(network_interface=None).set_world_size(2)
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(os.environ)


def test_table_is_printed_by_rank_zero_once(caplog):
    """Rank 0 prints one report for all environments and Trainers of the process."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    for _ in range(2):
        environment = _prepared("algo-2", MIXED, name="job")
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


def test_a_job_with_gpus_is_told_that_none_was_tested(caplog):
    """Rank 0 logs a note about GPUs beside the table of hosts."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    _prepared(name="job", num_gpus=4).set_world_size(8)
    assert caplog.messages[0] == GPUS
    assert len(caplog.messages) == 2


def test_other_ranks_print_no_table(caplog):
    """Only rank 0 prints the report."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    _prepared("algo-2").set_world_size(2)
    assert caplog.messages == []


def test_an_order_of_torchrun_that_differs_from_the_table_is_told(caplog):
    """A host whose node rank differs from the table logs it; the table's last line names rank 0's host."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    _prepared("algo-2", variables={**torchrun(0), "LOCAL_RANK": "0"}).set_world_size(4)
    first, second = caplog.messages
    assert first == "torchrun orders the hosts differently from the table: host algo-2 has node rank 0."
    assert "torchrun, main address algo-2:7777" in second


def _ranks():
    return {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}


@pytest.mark.parametrize("variables", [torchrun(1), mpi(3, devices=2, size=4)], ids=["torchrun", "mpirun"])
def test_rank_variables_end_with_the_run_and_come_back_with_the_next(variables):
    """Teardown restores the launcher's variables after each run; hooks and exit handlers stay for the next run."""
    environment = _prepared("algo-2" if "OMPI_COMM_WORLD_RANK" in variables else "algo-1", variables=variables)
    excepthook = sys.excepthook
    before = _ranks()
    for _ in range(2):
        environment.set_world_size(4)
        environment.set_world_size(4)  # called by Trainer() and by fit
        assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"} <= _ranks().keys()
        environment.teardown()
        assert _ranks() == before
    assert sys.excepthook is excepthook


def test_a_worker_of_ddp_spawn_sets_its_ranks_and_leaves_its_group_after_success(monkeypatch, caplog, exit_handlers):
    """A worker of ddp_spawn sets its ranks, prints no second table and leaves its parent's state alone."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    parents = _prepared("algo-1")
    parents.set_world_size(4)
    pickled = pickle.dumps(parents)
    forget_preparation()
    exit_handlers.clear()
    caplog.clear()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    environment = pickle.loads(pickled)  # noqa: S301 - made above
    environment.set_global_rank(1)
    environment.set_world_size(4)
    assert _ranks()["RANK"] == "1"
    assert exit_handlers == []
    environment.teardown()
    assert "RANK" not in _ranks()
    assert exit_handlers == [group_exit._await_threads, group_exit._leave]
    assert caplog.messages == []
