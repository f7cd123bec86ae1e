"""What users see when their code or a data host fails, and what they do not see."""

import os
import signal
import threading
import time

import pytest
from torch.utils.data import DataLoader

from lightning_sm.errors import DataHostUnreachableError, DataServiceError, RemoteTransformError
from tests.fakes.reserved_job import reserve_job
from tests.integration.data.cluster import Host, remote, running
from tests.integration.data.datasets import HOST_VARIABLE, Augmented, Broken, reference, stream_hash

pytestmark = pytest.mark.processes

LENGTH, BATCH_SIZE = 400, 4


def crash():
    """Die as native code does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def fail():
    """Fail as a transform does."""
    raise KeyError("no label for sample 13")


def fail_on_a():
    """Fail as on a host with a broken disk."""
    if os.environ[HOST_VARIABLE] == "a":
        fail()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two data hosts with a loader for every kind of failure."""
    flag = tmp_path_factory.mktemp("flags") / "killed"

    def be_killed_once():
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def make():
        breaks = {"crash": crash, "fail": fail, "fail_on_a": fail_on_a, "killed_once": be_killed_once}
        loaders = {name: DataLoader(Broken(function), batch_size=4) for name, function in breaks.items()}
        return {"slow": DataLoader(Augmented(LENGTH, 0.002), batch_size=BATCH_SIZE), **loaders}

    with running(Host("a", make), Host("b", make)) as started:
        yield started


def gaps_of(stream, first=()):
    """Take the rest of a stream; return the seconds between batches, and the batches."""
    gaps, batches, began = [], list(first), time.perf_counter()
    for batch in stream:
        gaps.append(time.perf_counter() - began)
        batches.append(batch)
        began = time.perf_counter()
    return gaps, batches


def indices(batches):
    """Return the samples in the order in which they came."""
    return [index for batch in batches for index in (batch["index"] if isinstance(batch, dict) else batch).tolist()]


def test_a_sample_that_crashes_workers_is_named(hosts):
    """After a few attempts the error tells step, indices and signal, and what to look for."""
    with (
        remote(hosts) as module,
        pytest.raises(DataServiceError, match=r"Step 3 kills the workers") as caught,
    ):
        list(module.train_dataloader()["crash"])
    assert "SIGSEGV" in str(caught.value)
    assert "[12, 13, 14, 15]" in str(caught.value)
    assert "crash native code" in str(caught.value)


def test_a_worker_that_is_killed_once_does_not_show(hosts):
    """The out-of-memory killer takes a worker; its batch is made elsewhere."""
    with remote(hosts) as module:
        assert indices(module.train_dataloader()["killed_once"]) == list(range(40))


def test_an_exception_in_a_transform_comes_with_its_traceback(hosts):
    """The trainer sees the user's traceback, the host, the worker and the index, after one attempt elsewhere."""
    with remote(hosts) as module, pytest.raises(RemoteTransformError, match="The batch of step 3 failed") as caught:
        list(module.train_dataloader()["fail"])
    text = str(caught.value)
    assert "KeyError: 'no label for sample 13'" in text
    assert "in fail" in text
    assert "index 13, worker " in text
    assert any(host.address in text for host in hosts)


def test_an_exception_on_one_host_only_does_not_show(hosts):
    """What fails on one host is tried on another, which may have an unbroken disk."""
    with remote(hosts) as module:
        for _ in range(3):
            assert indices(module.train_dataloader()["fail_on_a"]) == list(range(40))


def test_an_exception_on_the_only_host_that_is_left_is_raised(hosts):
    """With nobody else to ask, the same host is asked once more."""
    with remote(hosts[:1]) as module, pytest.raises(RemoteTransformError, match="no label for sample 13"):
        list(module.train_dataloader()["fail_on_a"])


def test_a_loader_can_be_used_after_a_failed_pass(hosts):
    """One failed pass ends neither the feeder nor other passes."""
    with remote(hosts) as module:
        loaders = module.train_dataloader()
        with pytest.raises(RemoteTransformError):
            list(loaders["fail"])
        assert indices(loaders["slow"]) == list(range(LENGTH))


def test_a_frozen_host_is_worked_around(hosts):
    """A host that stops answering, without closing a connection, costs less than a second, once."""
    with remote(hosts) as module:
        stream = iter(module.train_dataloader()["slow"])
        first = [next(stream) for _ in range(20)]
        hosts[0].signal(signal.SIGSTOP)
        try:
            gaps, batches = gaps_of(stream, first)
        finally:
            hosts[0].signal(signal.SIGCONT)
    assert indices(batches) == list(range(LENGTH))
    assert max(gaps) < 1.0, sorted(gaps)[-5:]


def test_a_frozen_worker_of_the_only_host_is_worked_around(hosts):
    """Another worker of the same host makes the batch for which the training waits."""
    with remote(hosts[:1]) as module:
        stream = iter(module.train_dataloader()["slow"])
        first = [next(stream) for _ in range(20)]
        worker = hosts[0].workers[0]
        worker.suspend()
        try:
            gaps, batches = gaps_of(stream, first)
        finally:
            worker.kill()
    assert indices(batches) == list(range(LENGTH))
    assert max(gaps) < 5.0, sorted(gaps)[-5:]


@pytest.fixture
def closed_port():
    """A port on which nobody listens, and that nobody else gets."""
    _, topology, ports = reserve_job({"trainer": ["algo-1"]})
    with ports:
        yield topology.main_port


def test_a_host_that_never_comes_is_done_without(hosts, closed_port):
    """One address leads nowhere; the others do the work."""
    with remote([f"127.0.0.1:{closed_port}", hosts[0]]) as module:
        assert indices(module.train_dataloader()["slow"]) == list(range(LENGTH))


def test_nobody_at_the_start_is_an_error(closed_port):
    """After startup_timeout_s the error names all hosts and why they cannot be reached."""
    addresses = [f"127.0.0.1:{closed_port}", f"127.0.0.2:{closed_port}"]
    began = time.perf_counter()
    with (
        pytest.raises(DataHostUnreachableError, match=r"within 2 s \(data_service.startup_timeout_s\)") as caught,
        remote(addresses, startup_timeout_s=2.0),
    ):
        pass
    assert time.perf_counter() - began < 10.0
    assert all(f"{address}: down (unavailable" in str(caught.value) for address in addresses)


def make_slow():
    """A loader whose epoch takes a few seconds with one worker."""
    return DataLoader(Augmented(LENGTH, 0.01), batch_size=BATCH_SIZE, shuffle=True)


def test_a_host_that_comes_late_is_adopted(closed_port):
    """A host that starts in the middle of an epoch takes its share, and the stream stays the same."""
    address = f"127.0.0.1:{closed_port}"
    with running(Host("first", make_slow, 1)) as started, remote([*started, address]) as module:
        stream = iter(module.train_dataloader())
        first = [next(stream) for _ in range(3)]
        with running(Host("late", make_slow, 2, address)):
            batches = first + list(stream)
            done = {host["name"]: host["batches"] for host in module._feeder.state()["hosts"]}
    assert stream_hash(batches) == stream_hash(reference(Augmented(LENGTH), LENGTH, BATCH_SIZE))
    assert done[address] > 0


def test_the_death_of_all_hosts_is_an_error():
    """When nobody is left, the error comes after batch_timeout_s, and names the hosts and the awaited step."""
    with (
        running(Host("a", make_slow), Host("b", make_slow)) as started,
        remote(started, batch_timeout_s=3.0) as module,
    ):
        stream = iter(module.train_dataloader())
        next(stream)
        for host in started:
            host.kill()
        began = time.perf_counter()
        with pytest.raises(DataHostUnreachableError, match="no batch has come, within 3 s") as caught:
            list(stream)
        assert time.perf_counter() - began < 8.0
    text = str(caught.value)
    assert all(f"{host.address}: down (unavailable" in text for host in started)
    assert "awaited: step " in text


def test_hosts_that_vanish_and_return_do_not_show():
    """All hosts are gone for a moment; the pass waits for them."""
    with running(Host("a", make_slow)) as started, remote(started) as module:
        stream = iter(module.train_dataloader())
        first = [next(stream) for _ in range(5)]
        started[0].kill()
        back = threading.Thread(target=started[0].start)
        back.start()
        batches = first + list(stream)
        back.join()
    assert stream_hash(batches) == stream_hash(reference(Augmented(LENGTH), LENGTH, BATCH_SIZE))
