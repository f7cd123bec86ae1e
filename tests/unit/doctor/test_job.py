"""The doctor's checks of the job and its hosts, with real sockets on the loopback interface."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, contextmanager

import pytest

from lightning_sm.doctor import job
from lightning_sm.doctor.context import Context, Status
from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.reserved_job import reserve_job

_GROUPS = {"trainer": ["algo-1", "algo-2"], "data": ["algo-3"]}
_LOOPBACK = {"algo-1": "127.0.0.2", "algo-2": "127.0.0.3", "algo-3": "127.0.0.4"}


@pytest.fixture
def port():
    """Reserve a main port for the test."""
    _, topology, ports = reserve_job(_GROUPS)
    with ports:
        yield topology.main_port


def _context(base, current="algo-1", addresses=_LOOPBACK, **env):
    types = dict.fromkeys(_GROUPS, "ml.m5.large")
    write_job(base, resource_config(_GROUPS, current, instance_types=types))
    variables = {"SAGEMAKER_BASE_DIR": str(base), "LIGHTNING_SM_HOST_ADDRESSES": json.dumps(addresses), **env}
    return Context.of(variables)


@contextmanager
def _listening(address, port, backlog=5):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(backlog)
        yield server


@contextmanager
def _dropping(address, port):
    """Simulate a host whose packets are lost: Linux drops SYNs when a listener's queue is full."""
    with _listening(address, port, backlog=0), ExitStack() as clients:
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((address, port))
        yield


def test_facts_of_a_job(tmp_path):
    """Job, host and rendezvous are shown with the source of the hosts."""
    context = _context(tmp_path, "algo-2", TRAINING_JOB_NAME="my-job", LIGHTNING_SM_MAIN_PORT="23456")
    found = {result.name: result for result in job.facts(context)}
    assert {result.status for result in found.values()} == {Status.OK}
    assert found["job"].found == f"my-job; hosts from {tmp_path}/input/config/resourceconfig.json"
    assert found["this host"].found == "algo-2, group trainer (ml.m5.large), role trainer, node rank 1 of 2"
    assert found["rendezvous"].found == "algo-1, port 23456"


def test_off_sagemaker_is_fine(tmp_path):
    """Without a job, one row states this, and there are no hosts to connect to."""
    context = Context.of({"SAGEMAKER_BASE_DIR": str(tmp_path)})
    (result,) = job.facts(context)
    assert result.status is Status.OK
    assert result.found.startswith("Not a SageMaker host")
    assert list(job.other_hosts(context)) == []


def test_malformed_file_is_a_problem_that_quotes_the_error(tmp_path):
    """A broken resourceconfig.json is a problem that names the file."""
    (result,) = job.facts(Context.of({"SAGEMAKER_BASE_DIR": str(write_job(tmp_path, resources="{not json"))}))
    assert result.status is Status.PROBLEM
    assert "resourceconfig.json" in result.found


def test_contradicting_groups_are_a_problem(tmp_path):
    """If no group trains, the contradiction is a problem, and the job is still shown."""
    base = write_job(tmp_path, resource_config({"data": ["algo-1"]}, "algo-1"))
    contradiction, shown = job.facts(Context.of({"SAGEMAKER_BASE_DIR": str(base)}))
    assert (contradiction.status, shown.status) == (Status.PROBLEM, Status.OK)
    assert "No group trains" in contradiction.found


def test_settings_are_shown_and_wrong_ones_found():
    """An unreadable value is a problem and an unknown name a warning; secrets are hidden."""
    secret = "s" * 64
    env = {"LIGHTNING_SM_HANG_S": "x", "LIGHTNING_SM_MAX_RESTART": "3", "LIGHTNING_SM_JOB_SECRET": secret}
    wrong, unread, settings = job.variables(Context.of(env))
    assert (wrong.status, unread.status, settings.status) == (Status.PROBLEM, Status.WARNING, Status.OK)
    assert wrong.found.startswith("LIGHTNING_SM_HANG_S='x': expected a number of seconds")
    assert unread.advice == "Did you mean LIGHTNING_SM_MAX_RESTARTS?"
    assert settings.found == "LIGHTNING_SM_HANG_S=x, LIGHTNING_SM_JOB_SECRET=(hidden)"


def test_reachable_hosts_listen_or_refuse(tmp_path, port):
    """A refused connection proves that a host is reachable, as does an accepted one."""
    with _listening("127.0.0.3", port):
        (result,) = job.other_hosts(_context(tmp_path, LIGHTNING_SM_MAIN_PORT=str(port)))
    assert result.status is Status.OK
    assert f"algo-2:{port} listens" in result.found
    assert f"algo-3:{port - 10_000} is reachable (nothing listens yet)" in result.found


@pytest.mark.parametrize(
    ("address", "reason", "advice"),
    [
        ("no such host", "does not resolve", "LIGHTNING_SM_HOST_ADDRESSES"),
        # Over TCP, the system sends nothing to a broadcast address, whatever the routes of this machine.
        ("255.255.255.255", "unreachable: ", "routes"),
    ],
)
def test_hosts_that_cannot_be_reached_are_a_problem_each_for_its_reason(tmp_path, address, reason, advice):
    """The unreachable host has a problem with the system's error, and the other hosts are still shown."""
    results = list(job.other_hosts(_context(tmp_path, addresses={**_LOOPBACK, "algo-2": address})))
    assert sorted(result.status.value for result in results) == ["ok", "problem"]
    lost = next(result for result in results if result.status is Status.PROBLEM)
    assert lost.found.startswith("algo-2:")
    assert reason in lost.found
    assert advice in lost.advice


def test_host_that_drops_packets_is_a_problem_by_the_deadline(tmp_path, port):
    """A host that does not answer within 5 s is a problem, and the advice names the security group."""
    with _dropping("127.0.0.3", port):
        lost, reached = job.other_hosts(_context(tmp_path, LIGHTNING_SM_MAIN_PORT=str(port)))
    assert (lost.status, reached.status) == (Status.PROBLEM, Status.OK)
    assert lost.found == f"algo-2:{port} (no answer within 5 s)"
    assert "security group" in lost.advice


def test_own_name_on_the_loopback_interface_is_a_warning(tmp_path):
    """A host whose name resolves to 127.x would listen where no other host can connect."""
    groups = {"trainer": ["algo-2", "localhost"]}
    base = write_job(tmp_path, resource_config(groups, "localhost"))
    addresses = {"algo-2": "127.0.0.3"}
    env = {"SAGEMAKER_BASE_DIR": str(base), "LIGHTNING_SM_HOST_ADDRESSES": json.dumps(addresses)}
    results = list(job.other_hosts(Context.of(env)))
    assert [result.status for result in results] == [Status.OK, Status.WARNING]
    assert "localhost" in results[1].found
