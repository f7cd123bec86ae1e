"""Tests of how a rank pickles objects: memory out of band, names of the script, errors with paths."""

import functools
import os
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from lightning_fabric.utilities.data import _replace_dunder_methods
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm._lightning import LightningModule, Trainer
from lightning_sm.data.host.pickler import Attributes, pickle_object
from lightning_sm.data.host.snapshot import load_from_trainers
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.remote_loader import LoaderSource, remote_loader
from lightning_sm.errors import DataSettingsError


def pickled_of(value):
    """Pickle an object for data hosts that have not run this script."""
    named = {f"loader.{name}": part for name, part in getattr(value, "__dict__", {}).items()}
    return pickle_object(value, by_name=False, named=named, advice="Create it in __getitem__.")


def travelled(value):
    """Return an object as a data host rebuilds it."""
    pickled = pickled_of(value)
    fd = pickled.write()
    assert os.fstat(fd).st_size == pickled.num_bytes
    try:
        return load_from_trainers(fd, "an object")
    finally:
        os.close(fd)


class Holder:
    """Something with attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Model(LightningModule):
    """A model whose collate function reads the epoch, and whose part may be another model."""

    def __init__(self, part=None):
        super().__init__()
        self.part = part

    def collate(self, samples):
        return samples, self.current_epoch


def attached(model):
    """Give a model a Trainer."""
    model.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return model


def test_a_model_in_a_loader_keeps_its_trainer():
    """A model keeps its trainer, which Lightning does not pickle: ``current_epoch`` would silently always be 0."""
    model = attached(Model(Model()))
    model.trainer.fit_loop.epoch_progress.current.completed = 7
    loader = travelled(DataLoader(range(3), collate_fn=model.collate))
    again = travelled(loader)  # as a data host sends it
    for arrived in (loader, again):
        assert arrived.collate_fn([1]) == ([1], 7)
        assert isinstance(arrived.collate_fn.__self__.part.trainer, TrainerView)


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    device = torch.device("cuda", 0)

    def cpu(self):
        """Return a copy on the CPU."""
        return self.as_subclass(torch.Tensor).clone()

    def numpy(self):
        """Refuse, as a tensor on a GPU does."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class OnGpuModel(Model):
    """A model as on a GPU: parameters, one of them tied, a buffer, and tensors in attributes."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 1))
        self.part.weight = torch.nn.Parameter(torch.ones(1, 2).as_subclass(OnGpu))
        self.tied = self.part.weight
        self.frozen = torch.nn.Parameter(torch.zeros(3).as_subclass(OnGpu), requires_grad=False)
        self.frozen.group = "frozen"
        self.register_buffer("mean", torch.full((2,), 5.0).as_subclass(OnGpu), persistent=False)
        self.losses = [torch.tensor(7.0).as_subclass(OnGpu)]
        self._device = torch.device("cuda", 0)


def test_a_model_in_a_loader_arrives_on_the_cpu():
    """A model arrives on the CPU: the strategy has already moved it to the GPU, which data hosts lack."""
    model = travelled(DataLoader(range(3), collate_fn=attached(OnGpuModel()).collate)).collate_fn.__self__
    tensors = (model.part.weight, model.frozen, model.mean, *model.losses)
    assert [one.device.type for one in (model, *tensors)] == ["cpu"] * 5
    assert [one.tolist() for one in tensors] == [[[1, 1]], [0, 0, 0], [5, 5], 7]
    assert [(type(one), one.requires_grad) for one in tensors[:2]] == [
        (torch.nn.Parameter, True),
        (torch.nn.Parameter, False),
    ]
    assert (model.tied is model.part.weight, model.frozen.group) == (True, "frozen")


def test_other_tensors_on_a_gpu_arrive_on_the_cpu():
    """Other tensors on a GPU arrive on the CPU, where data hosts build batches."""
    rows = travelled(Holder(rows=torch.ones(3).as_subclass(OnGpu))).rows
    assert (rows.device.type, rows.tolist()) == ("cpu", [1, 1, 1])


def test_a_model_without_a_trainer_gets_none():
    """A model without a Trainer arrives without one, for example a teacher that is not trained."""
    with pytest.raises(RuntimeError, match="not attached"):
        _ = travelled(Model()).trainer


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(50_000),
        torch.arange(3),
        torch.zeros(0, 4),
        torch.tensor(7),
        torch.rand(200, 200).t(),
        torch.rand(100, 100).bfloat16(),
        torch.rand(100, 100, requires_grad=True),
        torch.randn(100, dtype=torch.complex64).conj(),
        torch.rand(30_000)[::2],
        torch.nn.Parameter(torch.rand(3)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_tensors_arrive_as_they_are(tensor):
    """Tensors arrive unchanged, whether or not NumPy can express them."""
    arrived = travelled(tensor)
    assert type(arrived) is type(tensor)
    assert (arrived.dtype, arrived.requires_grad, arrived.layout) == (tensor.dtype, tensor.requires_grad, tensor.layout)
    assert torch.equal(arrived, tensor)


def test_memory_is_writable_and_aligned_and_belongs_to_the_copy():
    """Each copy has writable, aligned memory, so transforms change neither the snapshot nor other copies."""
    array, tensor = np.arange(20_000), torch.arange(20_000.0)
    pickled = pickled_of((array, tensor))
    fd = pickled.write()
    first, second = (load_from_trainers(fd, "an object") for _ in range(2))
    os.close(fd)
    first[0][0] = first[1][0] = -1
    assert (second[0][0], second[1][0], array[0]) == (0, 0, 0)
    assert [one.ctypes.data % 64 for one in (first[0], first[1].numpy())] == [0, 0]


def test_large_memory_is_no_part_of_the_pickle():
    """Large memory is not copied before it is written, and the pickle itself stays small."""
    assert sum(part.nbytes for part in pickled_of(np.zeros(1 << 20))._parts[:3]) < 1000


def test_equal_objects_have_the_same_digest():
    """Equal objects have the same digest, so nothing is sent twice; a change anywhere in memory changes it."""
    array = np.arange(50_000)
    before = pickled_of(Holder(array=array, name="x")).digest
    assert pickled_of(Holder(array=array.copy(), name="x")).digest == before
    array[40_000] += 1
    assert pickled_of(Holder(array=array, name="x")).digest != before


def test_a_trainer_becomes_a_view():
    """A dataset's Trainer, which holds the model, becomes a view."""
    model = attached(Model())
    model.trainer.fit_loop.epoch_progress.current.completed = 3
    view = travelled(Holder(trainer=model.trainer)).trainer
    assert (view.current_epoch, view.world_size) == (3, 1)
    with pytest.raises(
        AttributeError, match=r"trainer\.lightning_module is not available on a data host, only current_"
    ):
        _ = view.lightning_module


@pytest.mark.parametrize("is_in_hook", [False, True])
def test_an_iterator_of_persistent_workers_stays(is_in_hook):
    """A loader arrives without its iterator, whether it was read before ``fit()`` or in a hook."""
    with _replace_dunder_methods(DataLoader, "dataset") if is_in_hook else nullcontext():
        loader = DataLoader(TensorDataset(torch.arange(4)), 2, num_workers=1, persistent_workers=True)
        assert len(list(loader)) == 2
    arrived = travelled(loader)
    assert arrived._iterator is None
    assert [batch.tolist() for (batch,) in DataLoader(arrived.dataset, 2)] == [[0, 1], [2, 3]]


class Rows(DataLoader):
    """A user's loader class."""


@pytest.mark.parametrize("cls", [DataLoader, Rows])
def test_a_loader_with_workers_on_data_hosts_arrives_as_the_users_own(cls):
    """A remote loader that a DataModule keeps, and sends with a collate method, arrives as the user's loader."""
    source = LoaderSource(ServiceConnection(["localhost:1"], DataServiceSettings(), "job"), "loader", 0, 1)
    arrived = travelled(remote_loader(cls(TensorDataset(torch.arange(4)), 2), source))
    assert type(arrived) is cls
    assert arrived.batch_size == 2


def local(number):
    """Return the argument."""
    return number


FILE = sys.__stdin__


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Holder(reader=Holder(lock=threading.Lock())), r"loader\.reader\.lock is a lock"),
        (Holder(files=[1, {"a": FILE}]), r"loader\.files\[1\]\['a'\] is a TextIOWrapper"),
        (Holder(rows=(number for number in range(3))), r"loader\.rows is a generator"),
        (Holder(transform=functools.partial(local, threading.Lock())), r"loader\.transform\.args\[0\] is a lock"),
        (Holder(method=Holder(lock=threading.Lock()).__class__(lock=threading.Lock()).__init__), r"__self__\.lock"),
    ],
    ids=["nested", "in containers", "generator", "partial", "method"],
)
def test_what_cannot_be_sent_is_named_by_its_path(value, path):
    """The error names the path to what cannot be sent, and what to do about it."""
    with pytest.raises(DataSettingsError, match=rf"{path}.*cannot be pickled: .*\. Create it in __getitem__\."):
        pickled_of(value)


def test_a_lock_in_a_closure_is_named():
    """A lock in the closure of a nested function is named."""
    lock = threading.Lock()
    with pytest.raises(DataSettingsError, match=r"loader\.transform \(lock in its closure\) is a lock"):
        pickled_of(Holder(transform=lambda sample: (lock, sample)))


def test_attributes_that_a_hook_has_changed_are_noticed():
    """New and replaced attributes are noticed, and small ones changed in place, but no unchanged ones."""
    owner = Holder(
        trainer=None, names=["a"], rows=np.zeros(20_000), more=np.zeros(20_000), many=["a" * 100] * 1000, n=1
    )
    before = Attributes(owner, ["n"], by_name=False)
    owner.names.append("b")
    owner.rows = owner.rows.copy()
    owner.more[0] = 1
    owner.classes, owner.n = 10, 2
    changed = Attributes(owner, ["n"], by_name=False).changed(before)
    assert changed.keys() == {"names", "rows", "classes"}
    assert changed["rows"][1] is None, "large arrays are not pickled to see whether they have changed"
