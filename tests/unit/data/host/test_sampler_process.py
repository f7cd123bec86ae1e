"""The process of a sampler, as the main process sees it; the test plays the process."""

import fcntl
import os
import resource
import sched
import socket
import time

import pytest

from lightning_sm.data.host.sampler_process import SamplerProcess
from lightning_sm.data.ipc.host_messages import RunSampler, SamplerOutput
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.protocol.calls import Crashed, LoaderPass, OrderSize

# Higher than select() takes.
HIGH_DESCRIPTOR = 1500


@pytest.fixture
def many_descriptors():
    """Let this process have them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_dies_answers_each_pass_once(many_descriptors):
    """By what it has sent, and by how it ended; afterwards, no deadline is left that would kill another process."""
    ours, theirs = socket.socketpair()
    with ours:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    scheduler, sent = sched.scheduler(time.monotonic), []
    stacks = os.memfd_create("stacks")
    sampler = SamplerProcess(0, MessageSocket(socket.socket(fileno=high)), stacks, scheduler)
    passes = [LoaderPass("1/fit/train/0", 0, 0, epoch, 0) for epoch in range(2)]
    for loader_pass in passes:
        sampler.run(RunSampler(loader_pass, 60.0))
    assert len(scheduler.queue) == 1
    process = MessageSocket(theirs)
    assert [process.receive(60.0).loader_pass for _ in passes] == passes
    answer = SamplerOutput(passes[0], OrderSize(1, 1, "d"))
    process.send(answer)
    process.close()
    sampler.end(-9, sent.append)
    assert sent == [answer, SamplerOutput(passes[1], Crashed("was killed by SIGKILL (out of memory?)"))]
    assert scheduler.empty()
