"""Slots are released only after the copies that read them, with a stand-in for CUDA."""

import logging
from collections import deque

import numpy as np

from lightning_sm.data.trainer.pinning import MAX_COPYING, PinnedSlots


class FakeCUDA:
    """Records what is registered; copies are done when a test says so, or when somebody waits for them."""

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
        """Whether everything before it is done."""
        return self.is_done

    def synchronize(self):
        """Wait until everything before it is done."""
        self.is_done = True


class FailedEvent(FakeEvent):
    """An event after a kernel that failed."""

    def query(self):
        """What torch raises from then on."""
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
    """A batch may be copied to several GPUs; the slowest counts."""
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
    """No more slots than the ring has for it are kept from the feeder."""
    free, cuda = [], FakeCUDA()
    slots = PinnedSlots(free.append, cuda)
    for slot in range(MAX_COPYING + 2):
        slots.drop(slot)
    slots.wait()
    assert free == [0, 1]
    assert not cuda.events[2][0].is_done


def test_nothing_dropped_records_no_event():
    """An event per batch would cost time for nothing."""
    cuda = FakeCUDA()
    assert not PinnedSlots(lambda _: None, cuda).advance()
    assert not cuda.events


def test_a_slot_is_locked_once_and_again_when_a_batch_is_larger():
    """Whole pages are locked, and a smaller batch changes nothing."""
    cuda = FakeCUDA()
    slots = PinnedSlots(lambda _: None, cuda)
    memory = np.zeros(20_000, np.uint8)
    for size in (5_000, 100, 8_192, 9_000):
        slots.lock(0, memory[:size])
    assert cuda.registered == [(memory.ctypes.data, 12_288)]


def test_closing_unlocks_the_memory_after_the_last_copy():
    """A second fit in the process must not find the memory of the first one still locked."""
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
    """CUDA fails every call after a failed kernel; the first error must not be replaced by that of the clean-up."""
    cuda = FakeCUDA()
    slots = PinnedSlots(lambda _: None, cuda)
    cuda.record_events = lambda: [FailedEvent()]
    slots.drop(0)
    with caplog.at_level(logging.WARNING):
        slots.close()
    assert "device-side assert" in caplog.text


def test_a_refusal_is_logged_once_and_training_continues(caplog):
    """Without page-locked memory, copies are slower but right."""
    cuda = FakeCUDA(status=2)
    slots = PinnedSlots(lambda _: None, cuda)
    with caplog.at_level(logging.WARNING):
        slots.lock(0, np.zeros(10, np.uint8))
        slots.lock(1, np.zeros(10, np.uint8))
    assert len(cuda.registered) == 1
    assert [record.message for record in caplog.records] == [
        "CUDA refused to page-lock a batch (error 2): copies to the GPU will be slower."
    ]
