"""The digits data module: splitting, enlarging, augmentation and reading from a folder."""

import numpy as np
import pytest
import torch

from app.digits import DigitsDataModule, write_digits


def prepared(**kwargs):
    """Return a data module that has read and split the images."""
    data = DigitsDataModule(**kwargs)
    data.setup("fit")
    return data


def stacked(dataset):
    """Return all images and all labels of a part, as one tensor each."""
    images, labels = zip(*(dataset[index] for index in range(len(dataset))), strict=True)
    return torch.stack(images), torch.stack(labels)


@pytest.fixture(scope="module")
def plain():
    """Return the images without augmentation, read once for this file."""
    return prepared(augment=False)


def parts(data):
    """Return the training, validation and test parts."""
    return [data.train_dataset, data.val_dataset, data.test_dataset]


def test_batches_fit_a_stock_resnet(plain):
    """A batch has three equal channels of 32x32 pixels and integer labels."""
    images, labels = next(iter(plain.train_dataloader()))
    assert images.shape == (32, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.shape == (32,)
    assert labels.dtype == torch.int64
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])


def test_pixels_are_normalized(plain):
    """The pixels of all images have a mean near 0 and a standard deviation near 1."""
    images = torch.cat([stacked(part)[0] for part in parts(plain)])
    assert images.mean().item() == pytest.approx(0, abs=0.01)
    # Enlarging smooths the images, so the deviation is slightly below 1.
    assert images.std().item() == pytest.approx(0.9, abs=0.05)


def test_the_three_parts_share_no_image_and_leave_none_out(plain):
    """Each of the 1,797 images is in exactly one part: 60%, 20% and 20%."""
    assert [len(part) for part in parts(plain)] == [1077, 360, 360]
    images = torch.cat([stacked(part)[0][:, 0].flatten(1) for part in parts(plain)])
    assert len(images.unique(dim=0)) == 1797


def test_each_part_has_the_same_share_of_every_digit(plain):
    """The split is stratified: each digit makes up at least 9% of each part (9.7% of all images)."""
    for part in parts(plain):
        shares = torch.bincount(stacked(part)[1], minlength=10) / len(part)
        assert shares.min() > 0.09


def test_the_split_does_not_depend_on_the_seed_of_the_run(plain):
    """Different hosts, or a run and its resumption with another seed, validate on the same images."""
    torch.manual_seed(99)
    np.random.seed(99)  # the split must not read the global state
    again = prepared(augment=False)
    for part, other in zip(parts(plain), parts(again), strict=True):
        assert torch.equal(stacked(part)[0], stacked(other)[0])
        assert torch.equal(stacked(part)[1], stacked(other)[1])


def test_test_images_stay_the_same_for_another_validation_share(plain):
    """A larger validation part reduces the training part, not the test part."""
    other = prepared(augment=False, val_fraction=0.4)
    assert [len(part) for part in parts(other)] == [718, 719, 360]
    assert torch.equal(stacked(plain.test_dataset)[0], stacked(other.test_dataset)[0])


@pytest.mark.parametrize("val_fraction", [0.0, 0.8, -0.1])
def test_a_share_that_leaves_nothing_is_refused(val_fraction):
    """A validation share that empties a part raises an error with the value."""
    with pytest.raises(ValueError, match=rf"val_fraction={val_fraction} leaves no images"):
        DigitsDataModule(val_fraction=val_fraction)


def test_augmentation_changes_training_images_only(plain):
    """Training images differ between epochs; validation and test images are not augmented."""
    data = prepared(augment=True)
    assert not torch.equal(data.train_dataset[0][0], data.train_dataset[0][0])
    assert torch.equal(data.train_dataset[0][1], plain.train_dataset[0][1])
    for part, other in zip(parts(data)[1:], parts(plain)[1:], strict=True):
        assert torch.equal(stacked(part)[0], stacked(other)[0])


def test_augmentation_follows_the_seed():
    """The same seed augments an image identically, so that runs are reproducible."""
    data = prepared(augment=True)
    torch.manual_seed(3)
    first = data.train_dataset[0][0]
    torch.manual_seed(3)
    assert torch.equal(data.train_dataset[0][0], first)


def test_only_training_drops_the_smaller_last_batch(plain):
    """Training uses 33 full batches of 32 of its 1,077 images; the other loaders use all images."""
    assert len(plain.train_dataloader()) == 33
    assert len(DigitsDataModule.train_dataloader(prepared(drop_last=False))) == 34
    for loader in (plain.val_dataloader(), plain.test_dataloader(), plain.predict_dataloader()):
        assert sum(len(labels) for _, labels in loader) == 360


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict", None])
def test_each_stage_has_its_loader(stage):
    """After setup for any stage, that stage's loader returns batches."""
    data = DigitsDataModule(batch_size=4)
    data.setup(stage)
    loaders = {"fit": data.train_dataloader, "test": data.test_dataloader, "predict": data.predict_dataloader}
    images, _ = next(iter(loaders.get(stage, data.val_dataloader)()))
    assert images.shape == (4, 3, 32, 32)


def test_a_folder_feeds_the_same_images(tmp_path, plain):
    """The file from write_digits contains the same tensors as scikit-learn's copy."""
    assert write_digits(tmp_path / "channel") == tmp_path / "channel" / "digits.npz"
    copied = prepared(augment=False, data_dir=str(tmp_path / "channel"))
    for part, other in zip(parts(plain), parts(copied), strict=True):
        assert torch.equal(stacked(part)[0], stacked(other)[0])
        assert torch.equal(stacked(part)[1], stacked(other)[1])


def test_a_folder_without_the_file_says_how_to_make_one(tmp_path):
    """A missing file raises an error that shows the command that creates it."""
    data = DigitsDataModule(data_dir=str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"digits\.npz does not exist\. Create it with python -c .*write_digits"
    ):
        data.setup("fit")


@pytest.mark.parametrize(
    "arrays",
    [
        {"images": np.zeros((5, 28, 28)), "labels": np.zeros(5)},
        {"images": np.zeros((5, 8, 8)), "labels": np.zeros(4)},
        {"pictures": np.zeros((5, 8, 8))},
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path, arrays):
    """Another image size, mismatched lengths or other array names raise an error with the shapes."""
    np.savez(tmp_path / "digits.npz", **arrays)
    with pytest.raises(ValueError, match=r"digits\.npz has images of shape .* expected \(N, 8, 8\) and \(N,\)"):
        prepared(data_dir=str(tmp_path))
