"""GpuTimer: events of a few steps, read once the device has passed them. A stand-in replaces the device."""

import pytest
import torch

from lightning_sm.record.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER
from lightning_sm.timing.gpu_timer import GpuTimer


class Device:
    """A stream whose work takes 1, 2, 3, ... ms between events, and which passes events only when told to."""

    def __init__(self):
        self.time_ms = 0.0
        self.recorded = 0
        self.passed = 0
        self.is_capturing = False
        self.is_broken = False


class Event:
    """A stand-in for torch.cuda.Event."""

    def __init__(self, device):
        self._device = device

    def record(self):
        device = self._device
        assert not device.is_capturing
        device.recorded += 1
        self.number = device.recorded
        device.time_ms += device.recorded
        self.at_ms = device.time_ms

    def query(self):
        if self._device.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.number <= self._device.passed

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch):
    """The device of torch.cuda."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: Event(device) if enable_timing else None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing)
    return device


def run_steps(timer, number):
    """Time the given number of training steps."""
    for _ in range(number):
        timer.begin_step(FORWARD)
        timer.mark(BACKWARD)
        timer.mark(OPTIMIZER)
        timer.end_step(OTHER)


def test_every_tenth_step_is_timed(device):
    """A timed step has a result in seconds once the device has passed all of its events."""
    timer = GpuTimer()
    run_steps(timer, 19)
    assert device.recorded == 4
    device.passed = 3
    assert timer.read() is None
    device.passed = 4
    assert timer.read() == pytest.approx({"forward": 0.002, "backward": 0.003, "optimizer": 0.004})
    assert timer.read() == pytest.approx({"forward": 0.002, "backward": 0.003, "optimizer": 0.004})


def test_means_are_of_all_steps_since_the_last_time(device):
    """The mean covers two timed steps, of 2, 3 and 4 ms and of 6, 7 and 8 ms."""
    timer = GpuTimer()
    run_steps(timer, 20)
    device.passed = device.recorded
    assert timer.read() == pytest.approx({"forward": 0.004, "backward": 0.005, "optimizer": 0.006})


def test_a_device_far_behind_has_the_events_of_the_newest_steps(device):
    """Only the newest 16 timed steps keep their events, so that these do not accumulate."""
    timer = GpuTimer()
    run_steps(timer, 1000)
    device.passed = device.recorded
    (first, *_), *_ = timer._pending
    assert (first[1].number, len(timer._pending)) == (84 * 4 + 1, 16)
    assert timer.read() is not None


def test_a_graph_that_is_captured_has_no_events(device):
    """No events are recorded during a capture, even if it begins within a step."""
    timer = GpuTimer()
    run_steps(timer, 9)
    timer.begin_step(FORWARD)
    device.is_capturing = True
    timer.mark(BACKWARD)
    timer.end_step(OTHER)
    run_steps(timer, 10)
    device.passed = device.recorded
    assert timer.read() is None


def test_a_broken_device_raises_nothing_here(device):
    """The timer raises no error, so that the error which broke the device stays visible."""
    timer = GpuTimer()
    run_steps(timer, 10)
    device.is_broken = True
    assert timer.read() is None
