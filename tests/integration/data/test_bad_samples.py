"""Samples that cannot be read are replaced, alike whatever hosts and workers read them, as many as the user permits."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_sm import DataServiceSettings, RemoteDataModule
from lightning_sm.errors import DataSettingsError, RemoteTransformError
from tests.integration.data.test_resume import (
    BATCH_SIZE,
    NUM_SAMPLES,
    Augmented,
    Data,
    Recorder,
    fit,
    serving,
)
from tests.integration.data.test_skip_steps import Streamed
from tests.integration.emulators import local

pytestmark = pytest.mark.processes

BAD = (5, 40, 41)


class Broken(Augmented):
    """Numbers of which some cannot be read."""

    def __init__(self, bad=BAD, size=NUM_SAMPLES):
        super().__init__(size)
        self.bad = bad

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"file {index} is truncated")
        return super().__getitem__(index)


class BrokenData(Data):
    """Such training data; validation data is whole."""

    def __init__(self, bad=BAD, kind=""):
        super().__init__()
        self.bad, self.kind = bad, kind

    def train_dataloader(self):
        data = Broken(self.bad)
        if self.kind == "batch sampler":
            return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), BATCH_SIZE, drop_last=False))
        if self.kind == "whole batches":
            return DataLoader(data, batch_size=None, shuffle=True)
        return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


def run(addresses, folder, max_bad_samples, *, data=None, model=None, **trainer):
    """Train two epochs; what was seen."""
    settings = DataServiceSettings(max_bad_samples=max_bad_samples)
    remote = RemoteDataModule(data or BrokenData(), addresses, settings=settings)
    return fit(addresses, folder, model=model, remote=remote, **trainer)


def expected(whole, bad=BAD):
    """The indices of a run without bad samples, after replacements."""
    found = []
    for epoch, number, indices, _ in whole:
        after = []
        for item, index in enumerate(indices):
            others = [*indices[item + 1 :], *indices[:item]]
            after.append(next(one for one in [index, *others] if one not in bad))
        found.append((epoch, number, tuple(after)))
    return found


def test_bad_samples_are_replaced_by_the_next_of_their_batch(pool, tmp_path, caplog):
    """Whichever hosts there are, all other samples and random numbers are those of whole data. The log names them."""
    data = BrokenData()
    addresses = serving(pool, data)
    whole = fit(addresses, tmp_path, data=BrokenData(bad=()))
    seen = [run(addresses[:number], tmp_path, len(BAD)) for number in (1, 3)]
    assert seen[0] == seen[1]
    assert [one[:3] for one in seen[0]] == expected(whole)
    changed = [one for one, other in zip(seen[0], whole, strict=True) if one != other]
    assert {one[:2] for one in changed} == {one[:2] for one in whole if set(one[2]) & set(BAD)}


def test_too_many_bad_samples_are_an_error_with_their_list(pool, tmp_path):
    """It is the error of the sample that is one too many, and names those before it."""
    addresses = serving(pool, BrokenData())
    with pytest.raises(RemoteTransformError, match=r"OSError: file \d+ is truncated") as raised:
        run(addresses, tmp_path, len(BAD) - 1)
    text = str(raised.value)
    assert "Samples that cannot be read: 3 (data_service.max_bad_samples=2):" in text
    named = re.findall(r"index (\d+) of train_dataloader\(\): OSError: file (\d+) is truncated", text)
    assert sorted(named) == sorted((str(index), str(index)) for index in BAD)


@pytest.mark.matrix(rows=["whole batches"])
@pytest.mark.parametrize("kind", ["batch sampler", "whole batches"])
def test_batches_that_the_users_code_makes(pool, tmp_path, kind):
    """A sample of a batch sampler's is replaced in its batch; a batch of the dataset's by the rank's next one."""
    data = BrokenData(kind=kind)
    addresses = serving(pool, data)[:2]
    whole = fit(addresses, tmp_path, data=BrokenData(bad=(), kind=kind), model=OfAny(), max_epochs=1)
    seen = run(addresses, tmp_path, len(BAD), data=data, model=OfAny(), max_epochs=1)
    if kind == "batch sampler":
        assert [one[:3] for one in seen] == expected(whole)
    else:
        order = [one[2] for one in whole]
        following = [next(one for one in (*order[at:], *order) if one[0] not in BAD) for at in range(len(order))]
        assert [one[2] for one in seen] == following


class OfAny(Recorder):
    """Takes batches of the dataset's, too, of one sample each."""

    def training_step(self, batch, batch_index):
        if isinstance(batch["index"], int):
            batch = {"x": batch["x"][None], "index": torch.tensor([batch["index"]])}
        return super().training_step(batch, batch_index)


class Flaky(Augmented):
    """Numbers of which one cannot be read at the first try, on whichever host."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __getitem__(self, index):
        if index == BAD[0]:
            try:
                (self.folder / "tried").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                raise OSError("stale file handle")
        return super().__getitem__(index)


class FlakyData(Data):
    """Such training data."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def train_dataloader(self):
        return DataLoader(Flaky(self.folder), batch_size=BATCH_SIZE, shuffle=True)


def test_a_sample_that_another_host_can_read_is_not_replaced(pool, tmp_path):
    """The batch is built again elsewhere, and nothing is missing."""
    data = FlakyData(tmp_path)
    addresses = serving(pool, data)[:2]
    seen = run(addresses, tmp_path, 1, data=data, max_epochs=1)
    assert (tmp_path / "tried").exists()
    assert seen == fit(addresses, tmp_path, data=BrokenData(bad=()), max_epochs=1)


def test_a_resumed_run_counts_the_samples_of_earlier_ones(pool, tmp_path):
    """The checkpoint has them: they are no new ones, and a smaller limit is an error as soon as one is met again."""
    addresses = serving(pool, BrokenData())
    saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    seen = run(addresses, tmp_path, len(BAD), callbacks=[saved])
    (middle,) = tmp_path.glob("step=11.ckpt")
    rest = run(addresses, tmp_path, len(BAD), ckpt_path=middle)
    assert rest == [one for one in seen if one[0] == 1]
    with pytest.raises(RemoteTransformError, match=r"cannot be read: 3 \(data_service.max_bad_samples=2\)"):
        run(addresses, tmp_path, len(BAD) - 1, ckpt_path=middle)


class Streaming(Data):
    """Training data without indices."""

    def train_dataloader(self):
        return DataLoader(Streamed(), batch_size=BATCH_SIZE)


def test_a_stream_is_refused(pool, tmp_path):
    """An iterator that has raised cannot go on, so nothing can be replaced: the error comes before the training."""
    addresses = serving(pool, Streaming())[:1]
    with pytest.raises(DataSettingsError, match=r"those of train_dataloader\(\) have none: its dataset is iterable"):
        run(addresses, tmp_path, 1, data=Streaming())


@pytest.mark.proof
def test_ranks_count_bad_samples_together(tmp_path):
    """Each of two ranks has one, as many as one rank may have alone: training ends, however long it would take."""
    script = Path(__file__).parents[1] / "scripts" / "train_augmented.py"
    for name in ("data", "work", "seen"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "data" / "values.npy", np.arange(90.0))
    # In the order of the dataset, rank 0 has samples 0 to 3 of the first step, and rank 1 samples 4 to 7.
    variables = {"SEEN": str(tmp_path / "seen"), "BAD": "1 6", "MAX_BAD": "1", "EPOCHS": "1000000"}
    groups = ("--group", "trainer=2", "--group", "data=1")
    command = ("--", str(script), str(tmp_path / "data"), "ordered")
    ended = local(tmp_path / "jobs", tmp_path / "work", *groups, *command, OMP_NUM_THREADS="1", **variables)
    assert ended.returncode != 0
    output = ended.stdout + ended.stderr
    assert "Samples that cannot be read: 2 (data_service.max_bad_samples=1)" in output
    assert all(
        f"index {index} of train_dataloader(): OSError: sample {index} is truncated" in output for index in (1, 6)
    )
