"""CIFAR-10 through lightning-bolts: generated files in the original format, and the import of lightning-bolts."""

import hashlib
import importlib.util
import pickle
import sys
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
from pytorch_lightning import Trainer
from torchvision.datasets import CIFAR10

from app.bolts_compat import import_bolts
from app.cifar10 import CIFAR10DataModule
from app.model import ResNet18Classifier

needs_bolts = pytest.mark.skipif(importlib.util.find_spec("pl_bolts") is None, reason="needs lightning-bolts")


@pytest.fixture
def cifar10_dir(tmp_path, monkeypatch):
    """Create a folder with 100 training and 20 test images in the original format, with checksums to match."""
    random = np.random.default_rng(0)
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def write_batch(name):
        pixels = random.integers(0, 256, (20, 3 * 32 * 32), dtype=np.uint8)
        return [name, write(name, {"data": pixels, "labels": random.integers(0, 10, 20).tolist()})]

    # torchvision compares each file's checksum with the original's. Replace the expected checksums, so that the
    # comparison still runs.
    monkeypatch.setattr(CIFAR10, "train_list", [write_batch(name) for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [write_batch(name) for name, _ in CIFAR10.test_list])
    meta = CIFAR10.meta
    names = {meta["key"]: [f"class {index}" for index in range(10)]}
    monkeypatch.setattr(CIFAR10, "meta", {**meta, "md5": write(meta["filename"], names)})
    monkeypatch.setattr(CIFAR10, "url", (tmp_path / "nowhere").as_uri())  # never the internet
    return tmp_path


def prepared(folder, stage="fit", **kwargs):
    """Return a data module that has read and split the files."""
    data = CIFAR10DataModule(data_dir=str(folder), batch_size=8, num_workers=0, val_split=20, **kwargs)
    data.prepare_data()
    data.setup(stage)
    return data


@needs_bolts
def test_batches_come_from_the_files_in_the_folder(cifar10_dir):
    """Files in the original format are used without a download and split as requested."""
    data = prepared(cifar10_dir)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (8, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 80
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 20
    assert data.num_classes == 10


@needs_bolts
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_each_stage_has_its_loader(cifar10_dir, stage):
    """Stages that lightning-bolts lacks also have images."""
    data = prepared(cifar10_dir, stage)
    loader = {"validate": data.val_dataloader, "test": data.test_dataloader, "predict": data.predict_dataloader}[stage]
    assert sum(len(labels) for _, labels in loader()) == 20


@needs_bolts
def test_augmentation_changes_training_images_only(cifar10_dir):
    """Only training images differ between epochs, and only with augmentation."""
    data = prepared(cifar10_dir)
    train, val = (loader().dataset for loader in (data.train_dataloader, data.val_dataloader))
    assert any(not torch.equal(train[index][0], train[index][0]) for index in range(5))
    assert all(torch.equal(val[index][0], val[index][0]) for index in range(5))
    plain = prepared(cifar10_dir, augment=False).train_dataloader().dataset
    assert all(torch.equal(plain[index][0], plain[index][0]) for index in range(5))


@needs_bolts
def test_pixels_are_normalized(cifar10_dir):
    """Pixels are scaled to [0, 1], then normalized by their channel's mean and standard deviation in CIFAR-10."""
    data = prepared(cifar10_dir)
    image = data.val_dataloader().dataset[0][0]
    original = data.val_dataloader().dataset
    raw = torch.from_numpy(original.dataset.data[original.indices[0]]).permute(2, 0, 1) / 255
    mean = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1) / 255
    std = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1) / 255
    assert torch.allclose(image, (raw - mean) / std, atol=1e-5)


@needs_bolts
def test_a_model_trains_and_validates_on_it(cifar10_dir):
    """Lightning accepts the wrapped data module for a whole fit and test."""
    trainer = Trainer(accelerator="cpu", fast_dev_run=2, enable_progress_bar=False, enable_model_summary=False)
    data = CIFAR10DataModule(data_dir=str(cifar10_dir), batch_size=8, val_split=20)
    model = ResNet18Classifier(data.num_classes)
    trainer.fit(model, data)
    assert trainer.global_step == 2
    assert "val_acc" in trainer.callback_metrics
    trainer.test(model, data, verbose=False)
    assert "test_acc" in trainer.callback_metrics


@needs_bolts
def test_a_damaged_file_is_not_used(cifar10_dir):
    """A file with another checksum counts as missing; without a download, the error names the folder and the fix."""
    (cifar10_dir / CIFAR10.base_folder / "data_batch_3").write_bytes(b"damaged")
    data = CIFAR10DataModule(data_dir=str(cifar10_dir))
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-py does not contain the original files .* Unpack"):
        data.prepare_data()


def without_bolts(monkeypatch):
    """Remove lightning-bolts from the imported modules until the end of the test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pl_bolts"]:
        monkeypatch.delitem(sys.modules, name)


class WithoutBolts:
    """A finder that reports lightning-bolts as missing."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Raise an error for lightning-bolts, and leave other modules to the next finder."""
        if name == "pl_bolts":
            raise ModuleNotFoundError("No module named 'pl_bolts'", name=name)


def test_missing_bolts_says_how_to_install_it(monkeypatch):
    """Without lightning-bolts, creating the data module raises an error with the command that installs it."""
    without_bolts(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [WithoutBolts, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps lightning-bolts==0\.7\.0"):
        CIFAR10DataModule()


@needs_bolts
def test_importing_bolts_is_silent(monkeypatch):
    """All warnings that lightning-bolts emits on import are suppressed."""
    without_bolts(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_bolts("pl_bolts.datamodules").CIFAR10DataModule.name == "cifar10"


def test_other_warnings_get_through(monkeypatch, tmp_path):
    """A warning that is not among the known ones is still shown."""
    (tmp_path / "noisy_module.py").write_text("import warnings\nwarnings.warn('look at this', stacklevel=1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="look at this"):
        import_bolts("noisy_module")
    monkeypatch.delitem(sys.modules, "noisy_module")


def test_another_missing_module_keeps_its_own_error():
    """Only a missing lightning-bolts gets the explanation."""
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        import_bolts("no_such_module")


def test_a_module_under_the_former_name_is_kept(monkeypatch):
    """If Lightning provides the module, it is not replaced."""
    own = ModuleType("pytorch_lightning.utilities.apply_func")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    import_bolts("math")
    assert sys.modules[own.__name__] is own
