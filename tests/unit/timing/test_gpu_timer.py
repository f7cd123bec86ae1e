"""GpuTimer: events of a few steps, read when the device has passed them. The device is a stand-in with its events."""

import pytest

from lightning_sm.record.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER
from lightning_sm.timing.gpu_timer import GpuTimer


class Device:
    """A stream whose work takes 1, 2, 3, ... ms between two events, and which passes no event until it is told to."""

    def __init__(self):
        self.time_ms = 0.0
        self.recorded = 0
        self.passed = 0
        self.is_capturing = False
        self.is_broken = False

    def event(self):
        """Make an event of this device."""
        return Event(self)

    def timer(self):
        """Make a timer of this device."""
        return GpuTimer(self.event, lambda: self.is_capturing)


class Event:
    """As torch.cuda.Event."""

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


def run_steps(timer, number):
    """Train."""
    for _ in range(number):
        timer.begin_step(FORWARD)
        timer.mark(BACKWARD)
        timer.mark(OPTIMIZER)
        timer.end_step(OTHER)


def test_every_tenth_step_is_timed():
    """Its events are read when the device has passed all of them, and give seconds; before, nothing is known."""
    device = Device()
    timer = device.timer()
    run_steps(timer, 19)
    assert device.recorded == 4
    device.passed = 3
    assert timer.read() is None
    device.passed = 4
    assert timer.read() == pytest.approx({"forward": 0.002, "backward": 0.003, "optimizer": 0.004})
    assert timer.read() == pytest.approx({"forward": 0.002, "backward": 0.003, "optimizer": 0.004})


def test_means_are_of_all_steps_since_the_last_time():
    """Two timed steps, of 2, 3, 4 and of 6, 7, 8 ms."""
    device = Device()
    timer = device.timer()
    run_steps(timer, 20)
    device.passed = device.recorded
    assert timer.read() == pytest.approx({"forward": 0.004, "backward": 0.005, "optimizer": 0.006})


def test_a_device_far_behind_has_the_events_of_the_newest_steps():
    """They would pile up."""
    device = Device()
    timer = device.timer()
    run_steps(timer, 1000)
    device.passed = device.recorded
    (first, *_), *_ = timer._pending
    assert (first[1].number, len(timer._pending)) == (84 * 4 + 1, 16)
    assert timer.read() is not None


def test_a_graph_that_is_captured_has_no_events():
    """Neither from the start of a step, nor when the capture begins within it."""
    device = Device()
    timer = device.timer()
    run_steps(timer, 9)
    timer.begin_step(FORWARD)
    device.is_capturing = True
    timer.mark(BACKWARD)
    timer.end_step(OTHER)
    run_steps(timer, 10)
    device.passed = device.recorded
    assert timer.read() is None


def test_a_broken_device_raises_nothing_here():
    """The error that broke it is the one to see."""
    device = Device()
    timer = device.timer()
    run_steps(timer, 10)
    device.is_broken = True
    assert timer.read() is None
