"""Slots of shared memory are separate, page aligned and sparse, and exist as long as a view of them does."""

import gc
import mmap
import os

import numpy as np

from lightning_sm.data.ipc.ring import Ring


def test_two_mappings_show_the_same_bytes():
    """Bytes written through one mapping are read through another, in the same slot and in no other."""
    ring = Ring.create(3, 10_000)
    other = Ring(os.dup(ring.fd), ring.num_slots, ring.slot_bytes)
    ring.slot(1)[:] = bytes([7]) * ring.slot_bytes
    assert set(other.slot(1)) == {7}
    assert set(other.slot(0)) == set(other.slot(2)) == {0}
    ring.close()
    other.close()


def test_slots_are_whole_pages():
    """Slot sizes are rounded up, so that every slot begins at a page."""
    ring = Ring.create(2, mmap.PAGESIZE + 1)
    assert ring.slot_bytes == 2 * mmap.PAGESIZE
    assert np.frombuffer(ring.slot(1), np.uint8).ctypes.data % mmap.PAGESIZE == 0
    ring.close()


def test_memory_is_taken_as_far_as_it_is_written():
    """Memory is used only where it is written, so a slot may be far larger than its batches."""
    ring = Ring.create(4, 1 << 30)
    assert os.fstat(ring.fd).st_blocks == 0
    ring.slot(2)[: 3 * mmap.PAGESIZE] = bytes([1]) * (3 * mmap.PAGESIZE)
    assert os.fstat(ring.fd).st_blocks * 512 == 3 * mmap.PAGESIZE
    ring.close()


def test_a_view_outlives_its_ring():
    """Closing the ring closes the descriptor once; the memory is freed with the last view."""
    ring = Ring.create(1, 100)
    view = ring.slot(0)[:5]
    view[:] = bytes([9]) * 5
    ring.close()
    ring.close()
    del ring
    gc.collect()
    assert bytes(view) == bytes([9]) * 5
