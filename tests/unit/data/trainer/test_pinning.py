"""Slots are released only after the copies that read them, with a stand-in for CUDA."""

import logging
from collections import deque

import numpy as np

from lightning_sm.data.trainer.pinning import PinnedSlots


class FakeCUDA:
    """Records what is registered; copies are done when a test says so."""

    def __init__(self, status=0):
        self.status, self.registered, self.events = status, [], deque()

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        self.registered.append((address, size))
        return self.status

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        self.registered = [entry for entry in self.registered if entry[0] != address]

    def Event(self):  # noqa: N802 - torch's name
        self.events.append(FakeEvent())
        return self.events[-1]


class FakeEvent:
    """An event that is reached when ``is_done`` is set."""

    is_done = False

    def record(self):
        """Nothing runs here."""

    def query(self):
        """Whether everything before it is done."""
        return self.is_done


def test_a_slot_is_released_after_the_copies_in_flight():
    """Dropping a batch does not free its slot; the event behind its copies does."""
    free, cuda = [], FakeCUDA()
    slots = PinnedSlots(free.append, cuda)
    slots.drop(3)
    slots.advance()
    slots.drop(4)
    slots.advance()
    assert free == []
    cuda.events[0].is_done = True
    slots.advance()
    assert free == [3]
    cuda.events[1].is_done = True
    slots.advance()
    assert free == [3, 4]


def test_nothing_dropped_records_no_event():
    """An event per batch would cost time for nothing."""
    cuda = FakeCUDA()
    PinnedSlots(lambda _: None, cuda).advance()
    assert not cuda.events


def test_a_slot_is_locked_once_and_again_when_a_batch_is_larger():
    """Whole pages are locked, and a smaller batch changes nothing."""
    cuda = FakeCUDA()
    slots = PinnedSlots(lambda _: None, cuda)
    memory = np.zeros(20_000, np.uint8)
    for size in (5_000, 100, 8_192, 9_000):
        slots.lock(0, memory[:size])
    assert cuda.registered == [(memory.ctypes.data, 12_288)]


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
