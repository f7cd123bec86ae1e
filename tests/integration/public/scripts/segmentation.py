"""Segmentation in the style of MONAI: dictionary transforms with separate generators, and tensors with metadata."""

import random

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_sm import SageMakerCLI


class MetaTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, x, affine=None, meta=None):
        return torch.as_tensor(x).as_subclass(cls)

    def __init__(self, x, affine=None, meta=None):
        super().__init__()
        self._meta = dict(meta or {})
        if affine is not None:
            self._meta["affine"] = affine
        self._applied_operations = []
        self._is_batch = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        source = next((arg for arg in args if isinstance(arg, MetaTensor)), None)
        if isinstance(result, MetaTensor) and source is not None and result is not source:
            vars(result).update(vars(source))
            result._applied_operations = list(source.applied_operations)
        return result

    @property
    def meta(self):
        return self._meta

    @property
    def affine(self):
        return self._meta["affine"]

    @property
    def applied_operations(self):
        return self._applied_operations

    @property
    def is_batch(self):
        return self._is_batch


class Randomizable:
    R = np.random.RandomState()

    def set_random_state(self, seed):
        self.R = np.random.RandomState(seed)
        return self


class LoadImaged:
    def __call__(self, data):
        generator = np.random.default_rng(data["id"])
        meta = {
            "filename_or_obj": f"case {data['id']}.nii",
            "spatial_shape": np.array([6, 6], ">i2"),
            "original_affine": np.eye(4) * data["id"],
        }
        image = MetaTensor(generator.random((1, 6, 6), np.float32), torch.eye(4, dtype=torch.float64), meta)
        label = MetaTensor((generator.random((1, 6, 6)) > 0.5).astype(np.float32), torch.eye(4), meta)
        return {**data, "image": image, "label": label}


class RandFlipd(Randomizable):
    def __call__(self, data):
        do_flip = bool(self.R.random() < 0.5)
        for key in ("image", "label"):
            if do_flip:
                data[key] = torch.flip(data[key], (1,))
            data[key].applied_operations.append(
                {"class": "RandFlip", "do_transforms": do_flip, "extra_info": {"axis": 1}}
            )
        return data


class RandGaussianNoised(Randomizable):
    def __call__(self, data):
        noise = self.R.normal(0, 0.1, data["image"].shape).astype(np.float32)
        data["image"] = data["image"] + torch.as_tensor(noise)
        return data


class Compose(Randomizable):
    def __init__(self, transforms):
        self.transforms = transforms
        self.set_random_state(random.getrandbits(32))

    def set_random_state(self, seed):
        super().set_random_state(seed)
        for transform in self.transforms:
            if isinstance(transform, Randomizable):
                transform.set_random_state(self.R.randint(2**32, dtype="uint64"))
        return self

    def __call__(self, data):
        for transform in self.transforms:
            data = transform(data)
        return data


class Cases(Dataset):
    def __init__(self, data, transform):
        self.data, self.transform = data, transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(dict(self.data[index]))


def list_data_collate(samples):
    batch = {"id": torch.tensor([sample["id"] for sample in samples])}
    for key in ("image", "label"):
        tensors = [sample[key] for sample in samples]
        stacked = MetaTensor(torch.stack([tensor.as_subclass(torch.Tensor) for tensor in tensors]))
        stacked._meta = {
            "affine": torch.stack([tensor.affine for tensor in tensors]),
            "filename_or_obj": [tensor.meta["filename_or_obj"] for tensor in tensors],
            "spatial_shape": np.stack([tensor.meta["spatial_shape"] for tensor in tensors]),
        }
        stacked._applied_operations = [tensor.applied_operations for tensor in tensors]
        stacked._is_batch = True
        batch[key] = stacked
    return batch


def worker_init_fn(worker_id):
    info = get_worker_info()
    info.dataset.transform.set_random_state(info.seed % 2**32)


class Volumes(LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        cases = [{"id": number} for number in range(48)]
        augmented = Compose([LoadImaged(), RandFlipd(), RandGaussianNoised()])
        self.training = Cases(cases[:32], augmented)
        self.validation = Cases(cases[32:], Compose([LoadImaged()]))

    def train_dataloader(self):
        return self.make_loader(self.training, shuffle=True)

    def val_dataloader(self):
        return self.make_loader(self.validation)

    def make_loader(self, dataset, **options):
        return DataLoader(
            dataset,
            self.hparams.batch_size,
            num_workers=2,
            collate_fn=list_data_collate,
            worker_init_fn=worker_init_fn,
            **options,
        )


class Segmentation(LightningModule):
    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Conv2d(1, 1, 3, padding=1)
        self.seen = {"train": [], "val": []}

    def step(self, batch, stage):
        image, label = batch["image"], batch["label"]
        assert type(image) is type(label) is MetaTensor
        assert image.is_batch
        assert image.affine.shape == (len(image), 4, 4)
        assert image.meta["spatial_shape"].tolist() == [[6, 6]] * len(image)
        assert image.meta["filename_or_obj"] == [f"case {number}.nii" for number in batch["id"].tolist()]
        assert [len(operations) for operations in image.applied_operations] == [stage == "train"] * len(image)
        sums = image.as_subclass(torch.Tensor).sum((1, 2, 3)).tolist()
        self.seen[stage] += zip(batch["id"].tolist(), sums, strict=True)
        out = self.net(image.as_subclass(torch.Tensor))
        return torch.nn.functional.binary_cross_entropy_with_logits(out, label.as_subclass(torch.Tensor))

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch, "val"), batch_size=len(batch["id"]), sync_dist=True)

    def on_train_end(self):
        print(f"seen {self.seen}\n", end="", flush=True)  # one write, so that lines of other ranks cannot mix in

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


if __name__ == "__main__":
    SageMakerCLI(Segmentation, Volumes, trainer_defaults={"num_sanity_val_steps": 0})
