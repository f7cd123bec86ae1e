"""The bad samples that the ranks of a run tell each other of count once."""

from __future__ import annotations

from lightning_sm.data.feeder.bad_samples import BadSamples
from lightning_sm.data.ipc.feeder_messages import LoaderPlace
from lightning_sm.data.protocol.calls import BadSample, HeartbeatRequest


def place(run="7", limit=2, bad_samples=()):
    """A training loader of a run."""
    return LoaderPlace(
        request_name=f"{run}/fit/train/0",
        index=0,
        stage="train",
        rank=0,
        world_size=2,
        seed=0,
        window_batches=1,
        window_bytes=1,
        max_batch_bytes=1,
        timeout_s=1.0,
        max_bad_samples=limit,
        bad_samples=list(bad_samples),
    )


def sample(index, run="7", loader=0):
    """A bad sample."""
    return BadSample(run, loader, index, "train_dataloader()", "OSError: no file")


def test_a_sample_counts_once_whoever_finds_it():
    """In a checkpoint, on this rank and on another; that of another run does not count."""
    known = BadSamples()
    known.begin_pass(place(bad_samples=[(0, 5, "train_dataloader()", "OSError: no file")]))
    assert not known.merge([sample(5), sample(9, run="8")])
    assert known.merge([sample(5), sample(6), sample(6)])
    assert (known.indices(0), known.indices(1), known.are_too_many) == ({5, 6}, set(), False)
    assert known.merge([sample(6, loader=1)])
    assert known.are_too_many
    assert known.describe().splitlines()[:2] == [
        "Samples that cannot be read: 3 (data_service.max_bad_samples=2):",
        "  index 5 of train_dataloader(): OSError: no file",
    ]


def test_another_run_of_the_trainer_starts_anew():
    """Its loaders may have other data."""
    known = BadSamples()
    known.begin_pass(place())
    known.merge([sample(5)])
    known.begin_pass(place())
    assert known.indices(0) == {5}
    known.begin_pass(place(run="8"))
    assert (known.known, known.describe()) == ((), "")


def test_all_that_may_be_permitted_fit_into_a_heartbeat():
    """Texts are as long as they may be."""
    samples = [BadSample("1" * 19, 0, 1 << 60, "train_dataloader()", "\U0001f600" * 200) for _ in range(1001)]
    beat = HeartbeatRequest("rank 0", 1, bad_samples=samples)
    assert HeartbeatRequest.parse(beat.encode()) == beat
