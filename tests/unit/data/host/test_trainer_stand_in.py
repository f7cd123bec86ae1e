"""What a DataModule on a data host sees as its Trainer, and code that splits the data by rank."""

import copy
import pickle
import re

import pytest
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sm.data.host.trainer_stand_in import TrainerStandIn, stand_in
from lightning_sm.data.host.world import world_of_one
from lightning_sm.data.protocol.calls import Loaders, OpenRequest
from lightning_sm.data.protocol.spec import TRAINER_VALUES
from lightning_sm.errors import DataSettingsError
from tests.fakes.hook_module import HookModule
from tests.fakes.requests import open_request
from tests.fakes.served_module import served

FACTS = {"world_size": 8, "num_devices": 4, "num_nodes": 2, "current_epoch": 3}


def trainer_with(values):
    """Return a stand-in with values of a Trainer."""
    trainer = TrainerStandIn()
    trainer.update(values)
    return trainer


def test_facts_of_the_trainer_are_there():
    """Epoch, steps and sizes are those of the trainers; the rank is 0, because one data host serves all ranks."""
    values = {name: number for number, name in enumerate(TRAINER_VALUES)}
    assert {name: getattr(trainer_with(values), name) for name in TRAINER_VALUES} == values
    ranks = ("global_rank", "local_rank", "node_rank", "is_global_zero")
    assert [getattr(trainer_with(values), name) for name in ranks] == [0, 0, 0, True]


def test_a_missing_fact_is_none():
    """Without a Trainer there are no values."""
    assert trainer_with({}).max_epochs is None


def test_anything_else_says_what_to_do():
    """The error names the attribute, the available ones, and what to do."""
    with pytest.raises(AttributeError, match=r"self.trainer.model is not available on a data host, only current_epoch"):
        _ = trainer_with({}).model


def test_a_copy_is_the_one_of_the_process():
    """Datasets that hold the DataModule are copied for each shard, or pickled for a worker."""
    assert copy.deepcopy(stand_in()) is stand_in()
    assert pickle.loads(pickle.dumps(TrainerStandIn())) is stand_in()  # noqa: S301  # its own


def test_a_worker_sees_the_epoch_of_its_batch():
    """Not that at which the worker was forked; the step of a batch is not known when it is built."""
    trainer = trainer_with({"current_epoch": 0, "global_step": 5})
    assert trainer.global_step == 5
    trainer.begin_batch(3)
    assert trainer.current_epoch == 3
    with pytest.raises(AttributeError, match=r"global_step is not available .* Use self.trainer.current_epoch"):
        _ = trainer.global_step


def opened(values=FACTS, **hooks):
    """Open the loaders for training, and return the reply."""
    return served(HookModule(**hooks)).open(OpenRequest(**open_request(trainer=values)))


def rank_and_size(trainer):
    """Split by rank."""
    return DataLoader(range(8)[trainer.global_rank :: trainer.world_size])


def rank_of_node(trainer):
    """Split by node."""
    return DataLoader(range(8)[trainer.node_rank :: trainer.num_nodes])


def size_and_rank(trainer):
    """Split by rank, the other way round."""
    size = trainer.world_size
    return DataLoader(range(size)[trainer.local_rank :: size])


def rank_of_torch(trainer):
    """Split by rank, of which torch has another idea than the Trainer."""
    return DataLoader(range(8)[torch.distributed.get_rank() :: trainer.world_size])


@pytest.fixture(autouse=True)
def _world_of_one():
    with world_of_one():
        yield


@pytest.mark.parametrize("split", [rank_and_size, rank_of_node, size_and_rank, rank_of_torch])
@pytest.mark.parametrize("hook", ["prepare_data", "setup", "train_dataloader"])
def test_a_hook_that_splits_by_rank_is_an_error(hook, split):
    """All but one part would be lost: the error names what was read, where, and what to write instead."""
    reply = opened(**{hook: split})
    assert reply.error == "DataSettingsError"
    assert re.search(r"_rank(\(\))?=0 \(", reply.text)
    assert reply.text.count("test_trainer_stand_in.py:") == 2
    assert "self.trainer.is_global_zero" in reply.text


@pytest.mark.parametrize(
    "hooks",
    [
        {"setup": lambda trainer: trainer.global_rank, "train_dataloader": lambda trainer: trainer.world_size and None},
        {"setup": lambda trainer: (trainer.is_global_zero, trainer.world_size)},
        {"setup": lambda trainer: (trainer.global_rank, trainer.local_rank, trainer.current_epoch)},
        {"train_dataloader": lambda trainer: DataLoader(range(8), batch_size=16 // trainer.world_size)},
        {"setup": lambda trainer: (trainer.world_size, DistributedSampler(range(8)))},
        {"setup": lambda _: range(8)[torch.distributed.get_rank() :: torch.distributed.get_world_size()]},
    ],
    ids=["each in a hook of its own", "is_global_zero", "ranks alone", "the size alone", "torch's own", "torch alone"],
)
def test_a_hook_that_does_not_split_is_none(hooks):
    """Ranks are read for logs, and sizes for the batch size."""
    assert isinstance(opened(**hooks), Loaders)


def test_with_one_rank_nothing_is_split():
    """The only rank gets all."""
    assert isinstance(opened({**FACTS, "world_size": 1}, train_dataloader=rank_and_size), Loaders)


def test_a_distributed_sampler_may_have_rank_and_size():
    """It is understood: the data service splits in its place. Only if all loaders of the hook have one."""

    def distributed(trainer):
        sampler = DistributedSampler(range(8), num_replicas=trainer.world_size, rank=trainer.global_rank)
        return DataLoader(range(8), sampler=sampler)

    assert isinstance(opened(train_dataloader=distributed), Loaders)
    mixed = opened(train_dataloader=lambda trainer: [distributed(trainer), rank_and_size(trainer)])
    assert mixed.error == "DataSettingsError"


def test_code_that_splits_by_rank_later_is_an_error():
    """A dataset in a worker that reads a rank and a size, of the Trainer that it kept."""
    values = trainer_with(FACTS)
    with values.noting_reads():
        assert values.global_rank == 0
    assert values.world_size == 8
    with pytest.raises(DataSettingsError, match=r"self\.trainer\.global_rank=0 .* self\.trainer\.world_size=8"):
        _ = values.global_rank
