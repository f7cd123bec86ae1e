"""Slots are released only after the copies that read them, tested with a fake CUDA."""

import logging
from collections import deque

import numpy as np

from lightning_sm.data.trainer.pinning import MAX_COPYING, PinnedSlots


class FakeCUDA:
    """Records registered memory; a copy is done when the test sets ``is_done``, or when something waits for it."""

    def __init__(self, status=0, num_devices=1):
        self.status, self.num_devices = status, num_devices
        self.registered, self.events = [], deque()

    def register(self, address, size):
        self.registered.append((address, size))
        return self.status

    def unregister(self, address):
        self.registered = [entry for entry in self.registered if entry[0] != address]

    def record_events(self):
        self.events.append([FakeEvent() for _ in range(self.num_devices)])
        return self.events[-1]


class FakeEvent:
    """An event that is reached when ``is_done`` is set."""

    is_done = False

    def query(self):
        """Return whether everything before the event is done."""
        return self.is_done

    def synchronize(self):
        """Wait until everything before the event is done."""
        self.is_done = True


class FailedEvent(FakeEvent):
    """An event after a failed kernel."""

    def query(self):
        """Raise the error that torch raises from then on."""
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_slot_is_released_after_the_copies_in_flight():
    """Dropping a batch does not free its slot; the event behind its copies does."""
    free, cuda = [], FakeCUDA()
    slots = PinnedSlots(free.append, cuda)
    slots.drop(3)
    assert slots.advance()
    slots.drop(4)
    assert slots.advance()
    assert free == []
    cuda.events[0][0].is_done = True
    assert slots.advance()
    assert free == [3]
    cuda.events[1][0].is_done = True
    assert not slots.advance()
    assert free == [3, 4]


def test_a_slot_is_released_after_the_copies_to_all_gpus():
    """If a batch is copied to several GPUs, its slot is released after the slowest copy."""
    free, cuda = [], FakeCUDA(num_devices=2)
    slots = PinnedSlots(free.append, cuda)
    slots.drop(3)
    slots.advance()
    cuda.events[0][0].is_done = True
    assert slots.advance()
    cuda.events[0][1].is_done = True
    assert not slots.advance()
    assert free == [3]


def test_a_loop_that_runs_ahead_of_its_gpu_waits_for_the_oldest_copy():
    """The loop waits rather than keep more slots from the feeder than the ring has for copies."""
    free, cuda = [], FakeCUDA()
    slots = PinnedSlots(free.append, cuda)
    for slot in range(MAX_COPYING + 2):
        slots.drop(slot)
    slots.wait()
    assert free == [0, 1]
    assert not cuda.events[2][0].is_done


def test_nothing_dropped_records_no_event():
    """No event is recorded if no batch was dropped, because every event costs time."""
    cuda = FakeCUDA()
    assert not PinnedSlots(lambda _: None, cuda).advance()
    assert not cuda.events


def test_a_slot_is_locked_once_and_again_when_a_batch_is_larger():
    """Whole pages are locked; a smaller batch changes nothing, and a larger one is locked anew."""
    cuda = FakeCUDA()
    slots = PinnedSlots(lambda _: None, cuda)
    memory = np.zeros(20_000, np.uint8)
    for size in (5_000, 100, 8_192, 9_000):
        slots.lock(0, memory[:size])
    assert cuda.registered == [(memory.ctypes.data, 12_288)]


def test_closing_unlocks_the_memory_after_the_last_copy():
    """Closing unlocks all memory, because a second fit in the process must not find it still locked."""
    free, cuda = [], FakeCUDA()
    slots = PinnedSlots(free.append, cuda)
    for slot in (0, 1):
        slots.lock(slot, np.zeros(10, np.uint8))
    slots.drop(0)
    slots.close()
    assert free == [0]
    assert cuda.registered == []
    slots.lock(1, np.zeros(10, np.uint8))
    assert cuda.registered == []


def test_closing_after_a_failed_kernel_leaves_the_error_to_the_user(caplog):
    """Closing only logs errors: CUDA fails every call after a failed kernel, whose error must not be hidden."""
    cuda = FakeCUDA()
    slots = PinnedSlots(lambda _: None, cuda)
    cuda.record_events = lambda: [FailedEvent()]
    slots.drop(0)
    with caplog.at_level(logging.WARNING):
        slots.close()
    assert "device-side assert" in caplog.text


def test_a_refusal_is_logged_once_and_training_continues(caplog):
    """If CUDA refuses to page-lock memory, copies are slower but correct, and one warning is logged."""
    cuda = FakeCUDA(status=2)
    slots = PinnedSlots(lambda _: None, cuda)
    with caplog.at_level(logging.WARNING):
        slots.lock(0, np.zeros(10, np.uint8))
        slots.lock(1, np.zeros(10, np.uint8))
    assert len(cuda.registered) == 1
    assert [record.message for record in caplog.records] == [
        "CUDA refused to page-lock a batch (error 2): copies to the GPU will be slower."
    ]
