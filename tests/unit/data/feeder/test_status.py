"""Errors name the step, its indices and every host that tried it."""

from lightning_sm.data.feeder.scheduler import FailureDecision
from lightning_sm.data.feeder.status import explain, host_snapshot
from lightning_sm.errors import DataServiceError, RemoteTransformError

FAILURES = tuple(f"was killed by SIGSEGV on data host {host}" for host in ("algo-2 (a:1)", "b:1", "algo-2 (a:1)"))


class Link:
    """A connection to a host that was never reached."""

    report, detail, name, num_lost, transfer_s = None, "unavailable", "algo-2:1", 0, 0.0


def test_a_batch_that_kills_workers_names_its_indices():
    """The error shows the first of many indices and counts the others; it also counts repeated failures."""
    error = explain("WorkerLost", 7, FailureDecision(is_fatal=True, failures=FAILURES), list(range(40)))
    assert type(error) is DataServiceError
    assert str(error).startswith(
        f"Step 7 kills the data hosts' workers: a worker {FAILURES[0]} (2 times); a worker {FAILURES[1]}. Look for "
    )
    assert str(error).endswith("12, 13, 14, 15] and 24 more.")


def test_a_batch_of_a_stream_has_no_indices():
    """The batches of a stream have no indices, so the error names none."""
    error = explain("WorkerLost", 7, FailureDecision(is_fatal=True, failures=FAILURES), [])
    assert str(error).endswith("use too much memory.")


def test_a_worker_that_cannot_start_blames_no_sample():
    """The error names where the worker failed during its start, and what to check, but no indices."""
    why = "exited with code 3 at worker_init_fn on data host b:1"
    error = explain("WorkerNotStarted", 7, FailureDecision(is_fatal=True, failures=(why, why)), list(range(40)))
    assert type(error) is DataServiceError
    assert str(error).startswith(f"The data hosts' workers cannot start: a worker {why} (2 times). Check worker_")
    assert "indices" not in str(error)


def test_an_error_of_the_user_keeps_its_name():
    """The last failure becomes the message; an unknown name becomes the general error."""
    decision = FailureDecision(is_fatal=True, failures=("KeyError: 3", "KeyError: 4\non data host b"))
    error = explain("RemoteTransformError", 3, decision, [])
    assert type(error) is RemoteTransformError
    assert str(error) == "KeyError: 4\non data host b"
    assert type(explain("Anything", 3, decision, [])) is DataServiceError


def test_a_host_that_was_never_reached_is_down():
    """A host that was never reached is down, with the reason and without figures."""
    snapshot = host_snapshot(Link(), None)
    assert (snapshot.name, snapshot.state, snapshot.why, snapshot.num_received) == (
        "algo-2:1",
        "down",
        "unavailable",
        0,
    )
    assert snapshot.workers == 0
