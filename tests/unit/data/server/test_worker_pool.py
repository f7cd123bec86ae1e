"""Tests of how a data host assigns tasks to workers, with fake workers."""

import os
import queue
import socket

import pytest

from lightning_sm.data.ipc.host_messages import BuildAnswer, NewWorker, Ready
from lightning_sm.data.ipc.messages import MessageSocket, NothingReceivedError
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.frames import EncodedBatch, StepRangeHeader
from lightning_sm.data.server import worker_pool
from lightning_sm.data.server.worker_pool import ServedRange, Task, WorkerPool, _Work

TIMEOUT_S = 60.0
OPENING = "train"
NUM_SLOTS = 2


class FakeWorker:
    """A fake worker: its end of the socket, and its memory.

    Args:
        pool: The pool to join.
        worker_id: The worker's id.
        number: The worker's number on the host.
        is_ready: Whether it reports that it is ready.
        opening: The opening that it works for.
        live: Other openings that are live.
    """

    def __init__(self, pool, worker_id, number=0, is_ready=True, opening=OPENING, live=()):
        ours, theirs = socket.socketpair()
        self.ring = Ring.create(NUM_SLOTS, 4096)
        self.socket = MessageSocket(ours)
        fds = (theirs.detach(), os.dup(self.ring.fd))
        pool.add(NewWorker(worker_id, number, opening, NUM_SLOTS, self.ring.slot_bytes, fds))
        pool.keep([opening, *live])
        if is_ready:
            self.socket.send(Ready())

    def next_request(self):
        """Return the encoded_spec and the slot of the next request."""
        message = self.socket.receive(TIMEOUT_S)
        return message.encoded_spec, message.slot

    def done(self, slot, value):
        """Answer a request with a batch of one byte."""
        self.ring.slot(slot)[0] = value
        self.socket.send(
            BuildAnswer(
                slot, StepRangeHeader(num_bytes=1, queue_s=0.0, produce_s=0.0, batches=[EncodedBatch(0, 1, b"")])
            )
        )

    def is_idle(self):
        """Return whether no request arrives."""
        try:
            return self.socket.receive(0.05) is None
        except NothingReceivedError:
            return True

    def close(self):
        """Close the socket and the memory, as happens when the process exits."""
        self.socket.close()
        self.ring.close()


@pytest.fixture
def killed():
    """The ids of workers that the pool has killed."""
    return queue.Queue()


@pytest.fixture
def pool(killed, monkeypatch):
    """A pool without workers, with a short grace period for hanging ones."""
    monkeypatch.setattr(worker_pool, "_CANCEL_GRACE_S", 0.1)
    pool = WorkerPool(killed.put)
    yield pool
    pool.close()


@pytest.fixture
def workers():
    """Workers that are closed at the end of the test."""
    made = []
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def worker(pool, workers):
    """A worker that is ready."""
    workers.append(FakeWorker(pool, 1))
    return workers[0]


def submit(pool, encoded_spec, client="rank 0", opening=OPENING, is_stream=False):
    """Submit a task, and return it with the queue of its answers."""
    answers = queue.Queue()
    task = Task(client, opening, encoded_spec, answers.put, is_stream=is_stream)
    pool.submit(task)
    return task, answers


def test_a_batch_comes_from_the_slot(pool, worker):
    """The answer holds the bytes that the worker wrote, until it is released."""
    _, answers = submit(pool, b"a")
    encoded_spec, slot = worker.next_request()
    assert encoded_spec == b"a"
    worker.done(slot, 42)
    answer = answers.get(timeout=TIMEOUT_S)
    assert isinstance(answer, ServedRange)
    assert (answer.header.batches, answer.data[: answer.header.num_bytes].tolist()) == ([EncodedBatch(0, 1, b"")], [42])
    answer.release()


def test_a_worker_fills_one_slot_while_the_other_is_sent(pool, worker):
    """When both slots are full, a worker waits until one has been sent."""
    answers = [submit(pool, name)[1] for name in (b"a", b"b", b"c")]
    produced = []
    for number in range(NUM_SLOTS):
        worker.done(worker.next_request()[1], number)
        produced.append(answers[number].get(timeout=TIMEOUT_S))
    assert worker.is_idle()
    produced[0].release()
    encoded_spec, slot = worker.next_request()
    assert encoded_spec == b"c"
    worker.done(slot, 3)
    assert answers[2].get(timeout=TIMEOUT_S).data[0] == 3
    assert produced[1].data[0] == 1


def test_clients_take_turns(pool, workers):
    """A rank with many requests does not starve the others."""
    worker = FakeWorker(pool, 1, is_ready=False)
    workers.append(worker)
    for name in (b"a1", b"a2", b"a3"):
        submit(pool, name, "a")
    submit(pool, b"b1", "b")
    worker.socket.send(Ready())
    order = []
    for _ in range(4):
        encoded_spec, slot = worker.next_request()
        order.append(encoded_spec)
        worker.socket.send(BuildAnswer(slot, Failure("RemoteTransformError", "")))
    assert order == [b"a1", b"b1", b"a2", b"a3"]


def test_a_failure_is_passed_on(pool, worker):
    """The answer has the error, its traceback and its place, and the slot is free again."""
    for _ in range(NUM_SLOTS + 1):
        _, answers = submit(pool, b"a")
        _, slot = worker.next_request()
        worker.socket.send(BuildAnswer(slot, Failure("RemoteTransformError", "Traceback", "index 3")))
        assert answers.get(timeout=TIMEOUT_S) == Failure("RemoteTransformError", "Traceback", "index 3, worker 0")


def test_a_dead_worker_loses_its_batch_and_nothing_else(pool, worker, workers):
    """A dead worker's task is answered as lost; the waiting tasks go to its replacement."""
    _, lost = submit(pool, b"a")
    _, kept = submit(pool, b"b")
    worker.next_request()
    pool.lose(1, "was killed by SIGKILL")
    assert lost.get(timeout=TIMEOUT_S) == Failure("WorkerLost", "was killed by SIGKILL", "worker 0")
    workers.append(FakeWorker(pool, 2))
    encoded_spec, slot = workers[-1].next_request()
    assert encoded_spec == b"b"
    workers[-1].done(slot, 1)
    assert isinstance(kept.get(timeout=TIMEOUT_S), ServedRange)


def test_the_batches_of_a_stream_go_back_with_a_dead_worker(pool, worker, workers):
    """A stream's waiting tasks are returned: built before the lost batch, they would take the stream past it."""
    _, lost = submit(pool, b"a", is_stream=True)
    _, waiting = submit(pool, b"b", is_stream=True)
    worker.next_request()
    pool.lose(1, "was killed by SIGKILL")
    assert lost.get(timeout=TIMEOUT_S).error == "WorkerLost"
    moved = waiting.get(timeout=TIMEOUT_S)
    assert moved == Failure("StreamMoved", "worker 0, which had the stream open, was killed by SIGKILL")
    workers.append(FakeWorker(pool, 2))
    assert workers[-1].is_idle()


def test_a_worker_that_dies_before_it_is_ready_fails_a_task(pool, workers):
    """The failed task tells the trainer; otherwise, workers that cannot start would be replaced for ever, unnoticed."""
    _, answers = submit(pool, b"a")
    workers.append(FakeWorker(pool, 1, is_ready=False))
    pool.lose(1, "was killed by SIGSEGV")
    assert answers.get(timeout=TIMEOUT_S).error == "WorkerNotStarted"


def test_a_worker_that_hangs_on_a_cancelled_task_is_killed(pool, worker, killed):
    """A worker that hangs on a cancelled task is killed after a grace period; the task is never answered."""
    task, answers = submit(pool, b"a")
    worker.next_request()
    pool.cancel(task)
    assert killed.get(timeout=TIMEOUT_S) == 1
    pool.lose(1, "was killed by SIGKILL")
    assert answers.empty()


def test_a_worker_may_finish_a_cancelled_task(pool, worker, killed, monkeypatch):
    """A worker that finishes a cancelled task in time is used again."""
    monkeypatch.setattr(worker_pool, "_CANCEL_GRACE_S", TIMEOUT_S)
    task, answers = submit(pool, b"a")
    _, slot = worker.next_request()
    pool.cancel(task)
    worker.done(slot, 1)
    _, more = submit(pool, b"b")
    _, slot = worker.next_request()
    pool._kill_if_hanging(pool._workers[1], task)  # as if the grace period had passed
    worker.done(slot, 2)
    assert more.get(timeout=TIMEOUT_S).data[0] == 2
    assert answers.empty()
    assert killed.empty()


def test_a_worker_that_takes_as_long_as_before_is_not_killed(pool, worker, killed):
    """Heavy batches get more time: killing a worker would lose its caches and leave files half-written."""
    _, answers = submit(pool, b"heavy")
    _, slot = worker.next_request()
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.3)
    worker.done(slot, 1)
    answers.get(timeout=TIMEOUT_S)
    task, _ = submit(pool, b"heavy, too")
    worker.next_request()
    pool.cancel(task)
    with pytest.raises(queue.Empty):
        killed.get(timeout=0.5)
    assert killed.get(timeout=TIMEOUT_S) == 1
    pool.lose(1, "was killed by SIGKILL")


def test_a_waiting_task_that_is_cancelled_is_forgotten(pool, worker):
    """A waiting task that is cancelled never reaches a worker."""
    submit(pool, b"a")
    task, _ = submit(pool, b"b")
    submit(pool, b"c")
    pool.cancel(task)
    worker.done(worker.next_request()[1], 1)
    assert worker.next_request()[0] == b"c"


def test_workers_whose_opening_is_closed_are_closed(pool, worker, workers):
    """A worker whose opening is closed finishes its task; its socket is closed once the batches are sent."""
    _, answers = submit(pool, b"a")
    _, slot = worker.next_request()
    workers.append(FakeWorker(pool, 2, opening="other"))
    worker.done(slot, 1)
    produced = answers.get(timeout=TIMEOUT_S)
    _, more = submit(pool, b"b", opening="other")
    workers[-1].done(workers[-1].next_request()[1], 2)
    more.get(timeout=TIMEOUT_S)
    assert produced.data[0] == 1
    produced.release()
    assert worker.socket.receive(TIMEOUT_S) is None


def test_workers_of_other_openings_stay_and_take_turns(pool, worker, workers):
    """Validation has separate workers, but no more workers are busy at a time than there are CPUs."""
    validation = "val"
    workers.append(FakeWorker(pool, 2, opening=validation, live=[OPENING]))
    submit(pool, b"a")
    _, slot = worker.next_request()
    submit(pool, b"v", opening=validation)
    assert workers[1].is_idle()
    assert pool.report("algo-3", 1).busy == 1
    submit(pool, b"b")
    worker.done(slot, 1)
    encoded_spec, slot = workers[1].next_request()
    assert encoded_spec == b"v"
    assert worker.is_idle()
    workers[1].done(slot, 2)
    assert worker.next_request()[0] == b"b"


def test_a_task_waits_for_a_worker_of_its_opening(pool, workers):
    """A task is never assigned to a worker of another opening."""
    workers.append(FakeWorker(pool, 1, live=("test",)))
    submit(pool, b"a", opening="test")
    assert workers[0].is_idle()


def test_the_report_counts_busy_workers(pool, worker):
    """The report counts the busy workers."""
    submit(pool, b"a")
    worker.next_request()
    assert pool.report("algo-3", 1).busy == 1


def test_closing_a_pool_whose_thread_has_ended_already(monkeypatch):
    """``close`` also works if a worker's message wakes the thread, which exits before ``close`` wakes it."""
    pool = WorkerPool(print)
    wake = pool._wake

    def wake_late():
        wake()
        pool._thread.join(TIMEOUT_S)
        wake()

    monkeypatch.setattr(pool, "_wake", wake_late)
    pool.close()
    assert not pool._thread.is_alive()


def test_the_time_of_demand_ends_with_the_last_request():
    """The last batches and the pause between two epochs do not make busy workers look idle.

    Of two workers, one is idle for 1 s of 4 for lack of requests; then the last batch takes 10 s, then nothing happens.
    """
    work = _Work()
    now = work._measured_at
    work.request(is_needed=False)
    work.advance(now + 1.0, num_busy=1, num_workers=2)
    work.request(is_needed=True)
    work.advance(now + 4.0, num_busy=2, num_workers=2)
    work.request(is_needed=True)
    assert (work.busy_s, work.capacity_s) == (pytest.approx(7.0), pytest.approx(8.0))
    work.advance(now + 14.0, num_busy=1, num_workers=2)
    work.advance(now + 99.0, num_busy=0, num_workers=2)
    work.request(is_needed=False)
    assert (work.busy_s, work.capacity_s) == (pytest.approx(7.0), pytest.approx(8.0))


def test_the_time_in_which_requests_wait_counts_without_further_ones():
    """Time with waiting requests counts even if no more arrive: a trainer may request a whole short epoch at once."""
    work = _Work()
    now = work._measured_at
    work.request(is_needed=False)
    work.advance(now + 3.0, num_busy=2, num_workers=2, has_waiting=True)
    work.advance(now + 4.0, num_busy=2, num_workers=2)
    work.advance(now + 5.0, num_busy=1, num_workers=2)
    work.request(is_needed=False)
    assert (work.busy_s, work.capacity_s) == (pytest.approx(6.0), pytest.approx(6.0))


def test_a_busy_worker_counts_while_others_wait_for_it(pool, worker):
    """Busy time counts as long as requests follow each other; a single request counts for nothing."""
    answers = [submit(pool, b"a")[1]]
    assert (pool.report("algo-3", 1).host.busy_s, pool.report("algo-3", 1).host.num_built) == (0.0, 0)
    _, slot = worker.next_request()
    answers.append(submit(pool, b"b")[1])
    worker.done(slot, 0)
    worker.done(worker.next_request()[1], 0)
    for each in answers:
        each.get(timeout=TIMEOUT_S)
    report = pool.report("algo-3", 1).host
    assert report.num_built == 2
    assert 0.0 < report.busy_s <= report.capacity_s
    assert report.built_s > report.busy_s


def test_tasks_of_what_is_closed_fail_at_once(pool, worker, workers):
    """Tasks of a closed opening fail, whether waiting or new, because no worker would ever take them."""
    submit(pool, b"running")
    worker.next_request()
    _, waiting = submit(pool, b"waiting")
    workers.append(FakeWorker(pool, 2, number=1, opening="other"))
    _, late = submit(pool, b"late")
    for answers in (waiting, late):
        failure = answers.get(timeout=TIMEOUT_S)
        assert (failure.error, failure.text) == ("NotOpen", f"{OPENING} is not open")


def test_tasks_may_come_before_the_workers(pool, workers):
    """After a restart of the server process, tasks wait for their workers: trainers may connect first."""
    _, answers = submit(pool, b"early")
    workers.append(FakeWorker(pool, 1))
    workers[0].done(workers[0].next_request()[1], 7)
    assert isinstance(answers.get(timeout=TIMEOUT_S), ServedRange)
