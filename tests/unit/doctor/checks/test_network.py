"""The doctor's checks of names and ports, with real sockets on the loopback interface."""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.doctor.checks import network
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status
from lightning_sm.job.topology import Topology
from tests.fakes.job_folder import make_job, resource_config, write_job
from tests.fakes.reserved_job import reserve_job

_GROUPS = {"trainer": ["algo-1", "algo-2"], "data": ["algo-3"]}
_LOOPBACK = {"algo-1": "127.0.0.2", "algo-2": "127.0.0.3", "algo-3": "127.0.0.4"}


@pytest.fixture
def port():
    """A main port that is the test's own, as is that of the launchers."""
    _, topology, ports = reserve_job(_GROUPS)
    with ports:
        yield topology.main_port


def _hosts(context, name):
    return [result for result in network.hosts(context) if result.name == name]


def _context(tmp_path, current="algo-1", addresses=_LOOPBACK, *, timeout_s=20, **env):
    types = dict.fromkeys(_GROUPS, "ml.m5.large")
    write_job(tmp_path, resource_config(_GROUPS, current, instance_types=types))
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "LIGHTNING_SM_HOST_ADDRESSES": json.dumps(addresses), **env}
    return Context.of(variables, timeout_s)


@contextmanager
def _listening(address, port, backlog=5):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(backlog)
        yield server


@contextmanager
def _dropping(address, port):
    """A host whose packets get lost: Linux drops SYNs where the queue of a listener is full."""
    with _listening(address, port, backlog=0), ExitStack() as clients:
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((address, port))
        yield


@pytest.mark.parametrize("main_port", [20_000, 29_999, 10_500])
@pytest.mark.parametrize("stated", [None, 4711])
def test_data_port_is_that_of_the_data_service(main_port, stated):
    """The doctor derives the port of data hosts as the data service does, hyperparameter included."""
    hyperparameters = {} if stated is None else {"data_service.port": json.dumps(stated)}
    job = make_job(_GROUPS, main_port=main_port, hyperparameters=hyperparameters)
    topology = Topology.from_job(job)
    assert network.data_port(job, topology) == DataServiceSettings(port=stated).port_in(topology)


@pytest.mark.parametrize("text", ["x", "0", "65536", "123456789", "-1", ""])
def test_data_port_ignores_what_is_no_port(text):
    """The script refuses a hyperparameter that is not a port."""
    job = make_job(_GROUPS, main_port=20_000, hyperparameters={"data_service.port": text})
    assert network.data_port(job, Topology.from_job(job)) == 10_000


def test_names_of_the_emulator_resolve_to_its_addresses(tmp_path):
    """Hosts that no resolver knows have the addresses of LIGHTNING_SM_HOST_ADDRESSES."""
    (result,) = _hosts(_context(tmp_path), "names")
    assert result.status is Status.OK
    for host, address in _LOOPBACK.items():
        assert f"{host} {address} (" in result.found


def test_names_that_do_not_resolve_are_a_problem(tmp_path):
    """Lost hosts are named; those that resolve are shown."""
    lost, found = _hosts(_context(tmp_path, addresses={**_LOOPBACK, "algo-3": "no such host"}), "names")
    assert (lost.status, found.status) == (Status.PROBLEM, Status.OK)
    assert lost.found.startswith("1 of 3 host names did not resolve: algo-3 (")
    assert "algo-3" not in found.found


def test_own_name_on_the_loopback_interface_is_a_warning(tmp_path):
    """A host that knows itself as 127.x would listen where no other host comes."""
    addresses = {"algo-1": "localhost", "algo-2": "127.0.0.3", "algo-3": "127.0.0.4"}
    results = _hosts(_context(tmp_path, addresses=addresses), "names")
    assert [result.status for result in results] == [Status.OK, Status.WARNING]
    assert "algo-1" in results[1].found


def test_free_ports_of_the_main_host(tmp_path, port):
    """The main host tries the port of rank 0, and that of its launcher."""
    results = list(network.own_port(_context(tmp_path, LIGHTNING_SM_MAIN_PORT=str(port))))
    assert [result.status for result in results] == [Status.OK, Status.OK]
    assert [result.found for result in results] == [
        f"{port} is free",
        f"{port - 5000} (between the launchers) is free",
    ]


def test_only_host_of_a_job_needs_no_port_for_launchers(tmp_path, port):
    """Without other hosts, no launcher connects."""
    write_job(tmp_path, resource_config({"trainer": ["algo-1"]}, "algo-1"))
    env = {"SAGEMAKER_BASE_DIR": str(tmp_path), "LIGHTNING_SM_MAIN_PORT": str(port)}
    (result,) = network.own_port(Context.of(env, 20))
    assert result.found == f"{port} is free"


def test_taken_port_of_the_launchers_is_a_warning(tmp_path, port):
    """The launcher's port is tried on the host's own address; without it the job runs, but hosts hear no failures."""
    context = _context(tmp_path, LIGHTNING_SM_MAIN_PORT=str(port))
    with _listening("127.0.0.9", port - 5000):
        assert [result.status for result in network.own_port(context)] == [Status.OK, Status.OK]
    with _listening(_LOOPBACK["algo-1"], port - 5000):
        main, launchers = network.own_port(context)
    assert (main.status, launchers.status) == (Status.OK, Status.WARNING)
    assert f"Port {port - 5000} (between the launchers) cannot be used here" in launchers.found
    assert "LIGHTNING_SM_MAIN_PORT" in launchers.advice


def test_taken_main_port_is_a_problem_that_names_the_owner(tmp_path, port):
    """A main port that another process holds stops the job; the process is named."""
    with _listening("", port):
        result, _ = network.own_port(_context(tmp_path, LIGHTNING_SM_MAIN_PORT=str(port)))
    assert result.status is Status.PROBLEM
    assert f"Port {port} " in result.found
    assert sys.executable.rpartition("/")[2] in result.found


def test_other_trainers_need_no_port(tmp_path):
    """A trainer that is not the main host listens on no known port."""
    assert list(network.own_port(_context(tmp_path, "algo-2"))) == []


def test_data_host_tries_its_port_on_its_own_address(tmp_path, port):
    """Data hosts of the emulator listen on one port, each on its own address."""
    env = {"LIGHTNING_SM_MAIN_PORT": str(port + 10_000)}
    with _listening("127.0.0.9", port):
        (result,) = network.own_port(_context(tmp_path, "algo-3", **env))
        assert result.found == f"{port} is free"
    with _listening("127.0.0.4", port):
        (result,) = network.own_port(_context(tmp_path, "algo-3", **env))
        assert result.status is Status.PROBLEM


def test_reachable_hosts_listen_or_refuse(tmp_path, port):
    """A refused connection proves the way as well as an accepted one."""
    with _listening("127.0.0.3", port):
        (result,) = _hosts(_context(tmp_path, LIGHTNING_SM_MAIN_PORT=str(port)), "other hosts")
    assert result.status is Status.OK
    assert f"algo-2:{port} listens" in result.found
    assert f"algo-3:{port - 10_000} reachable (nothing listens yet)" in result.found


def test_host_that_drops_packets_is_a_problem_by_the_deadline(tmp_path, port):
    """Without any answer the security group is named, within the time that was given."""
    with _dropping("127.0.0.3", port):
        context = _context(tmp_path, LIGHTNING_SM_MAIN_PORT=str(port), timeout_s=0.5)
        started = time.monotonic()
        reached, dropped = _hosts(context, "other hosts")
        seconds = time.monotonic() - started
    assert (reached.status, dropped.status) == (Status.OK, Status.PROBLEM)
    assert f"algo-2:{port}" in dropped.found
    assert "security group" in dropped.advice
    assert seconds < 30  # the kernel itself gives up after two minutes


def test_unknown_host_is_not_blamed_on_the_network(tmp_path):
    """A host without an address is a problem of names, and no connection is tried."""
    context = _context(tmp_path, addresses={**_LOOPBACK, "algo-2": "no such host"})
    (result,) = _hosts(context, "other hosts")
    assert result.status is Status.OK
    assert "algo-2" not in result.found


def test_address_without_a_route_is_out_of_reach(tmp_path):
    """What the system refuses at once is a problem with the system's words."""
    # The system sends nothing to a broadcast address over TCP, whatever the routes of this machine.
    (_, failed) = _hosts(_context(tmp_path, addresses={**_LOOPBACK, "algo-2": "255.255.255.255"}), "other hosts")
    assert failed.status is Status.PROBLEM
    assert failed.found.startswith("Unreachable: algo-2:")


@pytest.mark.parametrize("check", [network.hosts, network.own_port])
def test_off_sagemaker_there_are_no_hosts_to_check(tmp_path, check):
    """Without a job the checks of its hosts have nothing to say."""
    assert list(check(Context.of({"SAGEMAKER_BASE_DIR": str(tmp_path)}, 20))) == []
