"""On a data host, code that splits data by rank finds a world of one process."""

import contextlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from lightning_sm.data.host.world import show_world_of_one


@contextlib.contextmanager
def world_of_one():
    """Show a world of one, and undo it at the end."""
    variables, is_ours = dict(os.environ), not dist.is_initialized()
    show_world_of_one()
    try:
        yield
    finally:
        if is_ours:
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(variables)


@pytest.fixture
def torchrun(monkeypatch):
    """Set the variables of rank 5 of 8."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_torchruns_variables_tell_of_one_process(torchrun):
    """Code that reads torchrun's variables finds one process, and splits nothing."""
    with world_of_one():
        assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK")] == ["0"] * 4
        assert [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["1"] * 2


def test_there_is_a_process_group_of_one():
    """The default process group has one rank, and a sampler without arguments yields all samples."""
    with world_of_one():
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert list(DistributedSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]


def test_the_group_starts_no_threads():
    """The group starts no threads: data hosts fork their workers, and a thread could hold a lock for ever."""
    before = len(os.listdir("/proc/self/task"))
    with world_of_one():
        dist.barrier()
        assert len(os.listdir("/proc/self/task")) == before


def summed():
    """All-reduce."""
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor)
    return tensor.tolist()


def gathered():
    """All-gather."""
    tensors = [torch.zeros(3)]
    dist.all_gather(tensors, torch.arange(3.0))
    return tensors[0].tolist()


def gathered_objects():
    """All-gather of objects."""
    objects = [None]
    dist.all_gather_object(objects, {"files": 3})
    return objects


def broadcast_objects():
    """Broadcast."""
    objects = ["a", "b"]
    dist.broadcast_object_list(objects)
    return objects


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (dist.barrier, None),
        (summed, [0, 1, 2]),
        (gathered, [0, 1, 2]),
        (gathered_objects, [{"files": 3}]),
        (broadcast_objects, ["a", "b"]),
    ],
)
def test_collective_operations_give_what_gloo_gives(operation, expected):
    """In a world of one, torch's group for tests gives the results of gloo, on which hooks rely."""
    with world_of_one():
        assert operation() == expected
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert operation() == expected
    finally:
        dist.destroy_process_group()


def test_errors_are_not_marked_as_those_of_a_rank():
    """The process group does not change how errors are printed."""
    before = sys.excepthook
    with world_of_one():
        pass
    assert sys.excepthook is before


def test_a_group_of_the_users_own_stays():
    """A process group that the script has created on the data host is kept."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with world_of_one():
            assert dist.get_backend() == "gloo"
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
