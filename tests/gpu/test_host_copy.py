"""Copies of checkpoints by a stream of their own are those of their moment, however far the GPU is behind its CPU."""

import pytest
import torch

from lightning_sm.training.checkpoints.host_copy import HostCopy, PickledCheckpoint

pytestmark = pytest.mark.gpu

SIZE = 64 << 20  # values, of which a copy takes about 10 ms
# About 50 ms of a GPU at 2 GHz, for which the copy waits.
SLEEP_CYCLES = 100_000_000


def test_the_gpu_waits_where_tensors_change_at_once():
    """What the GPU is told to write next does not reach the copy, and the CPU waits for none of it."""
    copies = HostCopy(torch.device("cuda"))
    weight = torch.ones(SIZE, device="cuda")
    for number in (1, 2):  # the second time in the same memory
        torch.cuda._sleep(SLEEP_CYCLES)
        taken = copies.take(PickledCheckpoint.of({"weight": weight}))
        weight.add_(1)
        assert copies.wait() > 0
        copied = taken.load()
        assert torch.all(copied["weight"] == number)
        assert copied["weight"].is_pinned()


def test_what_only_an_optimizer_changes_is_copied_beside_the_computation():
    """Until ``wait``, it must not change; if something else changes it, that shows."""
    copies = HostCopy(torch.device("cuda"))
    weight, buffer = torch.ones(SIZE, device="cuda"), torch.ones(SIZE, device="cuda")
    for is_changed in (False, True):
        copied = copies.take(PickledCheckpoint.of({"weight": weight, "buffer": buffer}), {weight.data_ptr()}).load()
        buffer.add_(1)
        if is_changed:
            weight.data.add_(1)
        assert copies.is_intact() is not is_changed
        copies.wait()
        assert torch.all(copied["buffer"] == 1 + is_changed)
        assert is_changed or torch.all(copied["weight"] == 1)
