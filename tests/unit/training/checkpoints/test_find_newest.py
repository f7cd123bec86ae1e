"""The newest checkpoint is determined by the files' contents, and invalid ones are skipped with a warning."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import zipfile
from array import array
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pytorch_lightning.callbacks import Callback, ModelCheckpoint

from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.training.checkpoints import find_newest
from lightning_sm.training.checkpoints.find_newest import JOB_KEY, job_facts, newest_checkpoint
from lightning_sm.training.checkpoints.fits import Fit
from lightning_sm.training.checkpoints.pickle_peek import inert_checkpoint
from tests.fakes.small_app import SmallData, SmallModel, make_trainer

_BEGINNING = "is valid"


def newest_path(*args, **options):
    """The path of the newest checkpoint."""
    found = newest_checkpoint(*args, **options)
    return found and found.path


def a_job(name="job-1", uri="s3://bucket/ck"):
    """A job of one host."""
    return SageMakerJob(
        "algo-1", ("algo-1",), (InstanceGroup("g", ("algo-1",)),), "a test", name=name, checkpoint_uri=uri
    )


def a_fit(place="train.py:10", *, order=1, number=1):
    """A fit of the first Trainer that is created at a place in the script."""
    return Fit(place, 1, order, number)


def train(folder, max_epochs=2, **arguments):
    """Train with real checkpoints after each step; an epoch has two steps."""
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1, **arguments)
    make_trainer(callbacks=[saver], max_epochs=max_epochs).fit(SmallModel(), SmallData())


def a_checkpoint(step, *, epoch=0, batches=None, facts=None):
    """A minimal checkpoint like a Trainer's."""
    progress = {"total": {"processed": step if batches is None else batches}}
    checkpoint = {
        "global_step": step,
        "epoch": epoch,
        "loops": {
            "fit_loop": {"epoch_loop.batch_progress": progress, "epoch_progress": {"total": {"processed": epoch}}}
        },
        "state_dict": {"weight": torch.ones(20, 10), "cached": torch.zeros(1)},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    return checkpoint if facts is None else {**checkpoint, JOB_KEY: facts}


def save(path, checkpoint=None, **contents):
    """Write a checkpoint file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(a_checkpoint(**contents) if checkpoint is None else checkpoint, path)
    return path


def save_sharded(path, **contents):
    """Write a sharded checkpoint as Lightning's strategies do: weights in shards, the rest in meta.pt."""
    checkpoint = a_checkpoint(**contents)
    with pytest.warns(UserWarning, match="save in a single process"):
        dcp.save({"model": checkpoint.pop("state_dict")}, checkpoint_id=path, no_dist=True)
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, path / "meta.pt")
    return path


@pytest.fixture
def warnings_of(caplog):
    """A function that returns the warnings since its last call."""

    def take():
        texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        return texts

    return take


# ---- choice of the newest


def test_no_checkpoint_is_no_warning(tmp_path, warnings_of):
    """Nothing is logged if the folder is missing or contains no checkpoint."""
    (tmp_path / "notes.txt").write_text("hello")
    assert newest_path(tmp_path / "missing", a_job()) is None
    assert newest_path(tmp_path, a_job()) is None
    assert warnings_of() == []


def test_progress_decides_not_name_and_not_time(tmp_path, warnings_of):
    """The checkpoint of the last step is chosen, regardless of its name and modification time."""
    train(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]
    newest = (tmp_path / "step=4.ckpt").rename(tmp_path / "a.ckpt")
    for age, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (age * 1000, age * 1000))
    assert newest_path(tmp_path, a_job()) == newest
    assert warnings_of() == []


def test_the_found_checkpoint_resumes_a_trainer(tmp_path):
    """A Trainer resumes from the step of the checkpoint that was found."""
    train(tmp_path, max_epochs=1)
    found = newest_path(tmp_path)
    trainer = make_trainer(max_epochs=2, enable_checkpointing=False)
    trainer.fit(SmallModel(), SmallData(), ckpt_path=str(found))
    assert trainer.global_step == 4


def test_of_the_same_step_the_later_checkpoint_is_taken(tmp_path):
    """Checkpoints of validation, the end of an epoch and the end of training count as later than their step."""
    order = ["on_train_batch_end", "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end"]
    paths = [tmp_path / f"{index}-{hook}.ckpt" for index, hook in enumerate(order)]

    class _Everywhere(Callback):
        """Save at each of these hooks, keeping the last checkpoint of each."""

    for hook, path in zip(order, paths, strict=True):
        setattr(_Everywhere, hook, lambda self, trainer, *arguments, path=path: trainer.save_checkpoint(path))
    trainer = make_trainer(callbacks=[_Everywhere()], max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=False)
    trainer.fit(SmallModel(), SmallData())
    taken = []
    while (found := newest_path(tmp_path)) is not None:
        taken.append(found)
        found.unlink()
    assert taken[:2] == [paths[4], paths[3]]
    assert set(taken[2:4]) == {paths[1], paths[2]}  # these two have equal progress
    assert taken[4] == paths[0]


def test_batches_count_within_a_step(tmp_path):
    """While gradients accumulate, the checkpoint with more batches is chosen."""
    save(tmp_path / "a.ckpt", step=1, batches=4)
    save(tmp_path / "z.ckpt", step=1, batches=7)
    assert newest_path(tmp_path) == tmp_path / "z.ckpt"


def test_equal_checkpoints_give_the_same_choice_on_every_host(tmp_path):
    """Among equal checkpoints, the order of names decides, not the order of the directory."""
    for name in ("c", "b", "d"):
        save(tmp_path / f"{name}.ckpt", step=1)
    assert newest_path(tmp_path) == tmp_path / "b.ckpt"


def test_checkpoints_are_found_at_any_depth_but_not_hidden(tmp_path):
    """Subfolders are searched; hidden files, hidden folders and other suffixes are ignored."""
    deep = save(tmp_path / "version_0" / "checkpoints" / "deep.ckpt", step=1)
    save(tmp_path / ".sagemaker-ignore" / "whole.ckpt", step=9)
    save(tmp_path / ".hidden.ckpt", step=9)
    save(tmp_path / "weights.pt", step=9)
    assert newest_path(tmp_path) == deep


def test_unfinished_checkpoints_are_never_taken(tmp_path, warnings_of):
    """Unfinished files and folders and the upload agent's markers are ignored."""
    whole = save(tmp_path / "a.ckpt", step=1)
    save(tmp_path / "b.ckpt.sagemaker-ignore", step=9)
    save(tmp_path / "c.ckpt.sagemaker-ignore" / "part.ckpt", step=9)
    for ending in ("uploading", "uploaded"):
        (tmp_path / f"a.ckpt.sagemaker-{ending}").touch()
    assert newest_path(tmp_path) == whole
    assert warnings_of() == []


# ---- invalid files


def test_a_truncated_file_is_never_taken(tmp_path, warnings_of):
    """Wherever a file is truncated, the previous checkpoint is chosen, and the warning names both files."""
    good, bad = save(tmp_path / "good.ckpt", step=2), save(tmp_path / "bad.ckpt", step=3)
    whole = bad.read_bytes()
    for size in {*range(0, len(whole), 97), *range(len(whole) - 40, len(whole)), 1, 2, 3, 4, 5}:
        bad.write_bytes(whole[:size])
        assert newest_path(tmp_path) == good, size
        (warning,) = warnings_of()
        assert warning.startswith(f"{bad} "), size
        assert warning.endswith(f". Using {good} from step 2 instead."), size
    bad.write_bytes(whole)
    assert newest_path(tmp_path) == bad


def test_a_truncated_checkpoint_of_a_trainer_is_passed_over(tmp_path, warnings_of):
    """Half of a real checkpoint is reported as truncated."""
    train(tmp_path, max_epochs=1)
    newest = tmp_path / "step=2.ckpt"
    os.truncate(newest, newest.stat().st_size // 2)
    assert newest_path(tmp_path) == tmp_path / "step=1.ckpt"
    (warning,) = warnings_of()
    assert f"{newest} is truncated" in warning


@pytest.mark.parametrize("part", ["weights", "header"])
def test_a_checkpoint_with_a_changed_byte_is_passed_over(tmp_path, warnings_of, part):
    """A byte corrupted on disk or in transit is detected by the archive's checksums, which torch does not check."""
    older, newest = save(tmp_path / "a.ckpt", step=1), save(tmp_path / "b.ckpt", step=2)
    data = bytearray(newest.read_bytes())
    with zipfile.ZipFile(newest) as archive:
        (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith("data/0")]
    data[entry.header_offset + (200 if part == "weights" else 31)] ^= 64
    newest.write_bytes(data)
    assert torch.load(newest, weights_only=True)["global_step"] == 2
    assert newest_path(tmp_path) == older
    (warning,) = warnings_of()
    assert f"{newest} is damaged: the checksum of " in warning
    assert f"data/0 in b.ckpt is wrong. Using {older} from step 1 instead." in warning


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 5000, b"not a checkpoint", b"PK\x03\x04" + b"\0" * 500, pickle.dumps({"a": 1})]
)
def test_other_content_starts_from_the_beginning(tmp_path, warnings_of, content):
    """Other files are no error: a warning names each one, and training starts from the beginning."""
    (tmp_path / "x.ckpt").write_bytes(content)
    assert newest_path(tmp_path) is None
    first, second = warnings_of()
    assert first == f"{tmp_path / 'x.ckpt'} is truncated, or was not written by torch.save."
    assert _BEGINNING in second


@pytest.mark.parametrize("content", [torch.ones(2), {"weight": torch.ones(2)}, {"global_step": 1}, [1]])
def test_what_no_trainer_wrote_is_passed_over(tmp_path, warnings_of, content):
    """A file that torch can load but Lightning cannot resume from is skipped."""
    save(tmp_path / "x.ckpt", content)
    assert newest_path(tmp_path) is None
    assert "is not a checkpoint of a Lightning Trainer" in warnings_of()[0]


def test_a_checkpoint_of_the_weights_only_is_passed_over(tmp_path, warnings_of):
    """A weights-only checkpoint is skipped, with a warning only if it is further than the one chosen."""
    train(tmp_path / "weights", save_weights_only=True)
    train(tmp_path / "whole")
    assert newest_path(tmp_path) == tmp_path / "whole" / "step=4.ckpt"
    assert warnings_of() == []
    (tmp_path / "whole" / "step=4.ckpt").unlink()
    assert newest_path(tmp_path) == tmp_path / "whole" / "step=3.ckpt"
    (warning,) = warnings_of()
    assert "step=4.ckpt contains weights only. Using" in warning


class _Picky:
    """An object that reads its tensor while it is unpickled."""

    def __init__(self):
        self.scale = torch.tensor(2.0)

    def __setstate__(self, state):
        self.scale = float(state["scale"])


class _Harmful:
    """An object that runs code while it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("facts", [{"name": "job-1"}, {"name": "job-0", "checkpoint_s3_uri": "s3://bucket/ck/"}])
def test_any_object_may_be_in_a_checkpoint_of_the_job(tmp_path, facts):
    """Objects in a checkpoint of this job are created only when training resumes."""
    mark = tmp_path / "mark"
    objects = {**a_checkpoint(step=2, facts=facts), "hyper_parameters": {"x": _Harmful(mark)}}
    path = save(tmp_path / "x.ckpt", objects)
    assert newest_path(tmp_path, a_job()) == path
    assert not mark.exists()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (None, "does not state which job wrote it"),
        ("job-1", "does not state which job wrote it"),
        ({"name": "job-0", "checkpoint_s3_uri": "s3://other/ck"}, "is left over from job 'job-0'"),
        ({"name": None, "checkpoint_s3_uri": "s3://other/ck"}, "is left over from job None"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "sharded", "deepspeed"])
def test_no_code_of_a_checkpoint_runs_unless_it_says_that_it_is_of_the_job(tmp_path, warnings_of, facts, said, kind):
    """A checkpoint with objects that is not linked to this job is invalid, and none of the objects is created."""
    mark = tmp_path / "mark"
    harmful = {**a_checkpoint(step=5, facts=facts), "hyper_parameters": {"x": _Harmful(mark)}}
    folder = tmp_path / "ck"
    if kind == "file":
        save(folder / "x.ckpt", harmful)
    elif kind == "sharded":
        torch.save(harmful, save_sharded(folder / "x.ckpt", step=5) / "meta.pt")
    else:
        (main,) = save_deepspeed(folder / "x.ckpt", step=5).glob("*/mp_rank_00_model_states.pt")
        torch.save({**torch.load(main, weights_only=True), **harmful}, main)
    good = save(folder / "good.ckpt", step=1)
    assert newest_path(folder, a_job()) == good
    assert said in warnings_of()[0]
    assert not mark.exists()


def test_the_list_of_shards_runs_no_code(tmp_path):
    """The index of shards, which is a pickle, is read without creating its objects."""
    mark = tmp_path / "mark"
    path = save_sharded(tmp_path / "ck" / "x.ckpt", step=5)
    index = dcp.FileSystemReader(path).read_metadata()
    index.planner_data = _Harmful(mark)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert newest_path(tmp_path / "ck", a_job()) == path
    assert not mark.exists()


def test_every_object_can_be_passed_over(tmp_path):
    """Objects are read as inert placeholders, however they are pickled; plain values are read normally."""
    values = {"plain": [1, "a", {"b": (2.5, None)}], JOB_KEY: job_facts(a_job(), a_fit())}
    objects = [
        _Picky(),
        Path("x"),
        OrderedDict(a=1),
        defaultdict(list, a=[1]),
        deque([1]),
        array("i", [1]),
        Fraction(1, 2),
    ]
    objects += [
        datetime(2026, 1, 1, tzinfo=timezone.utc),
        np.arange(3),
        np.float32(2),
        torch.nn.Linear(2, 2),
        frozenset({1}),
        len,
    ]
    path = tmp_path / "x.pt"
    torch.save({**values, "objects": objects}, path)
    read = inert_checkpoint(path)
    assert {name: read[name] for name in values} == values
    assert len(read["objects"]) == len(objects)


# ---- sharded checkpoints


def test_a_whole_sharded_checkpoint_is_taken(tmp_path, warnings_of):
    """A folder of torch.distributed.checkpoint counts as one checkpoint and is compared with files."""
    save(tmp_path / "file.ckpt", step=3)
    sharded = save_sharded(tmp_path / "sharded.ckpt", step=4)
    assert (sharded / "__0_0.distcp").is_file()
    assert newest_path(tmp_path) == sharded
    save(tmp_path / "later.ckpt", step=5)
    assert newest_path(tmp_path) == tmp_path / "later.ckpt"
    assert warnings_of() == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (".metadata", "is a folder without .metadata"),
        ("meta.pt", "is a folder without meta.pt"),
        ("__0_0.distcp", "has no shard __0_0.distcp"),
    ],
)
def test_a_sharded_checkpoint_without_a_file_is_passed_over(tmp_path, warnings_of, name, fault):
    """A sharded checkpoint needs all of its files, and the warning names the missing one."""
    good = save(tmp_path / "good.ckpt", step=3)
    sharded = save_sharded(tmp_path / "sharded.ckpt", step=4)
    (sharded / name).unlink()
    assert newest_path(tmp_path) == good
    (warning,) = warnings_of()
    assert f"{sharded} {fault}" in warning


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
def test_a_sharded_checkpoint_with_a_truncated_file_is_never_taken(tmp_path, name):
    """Wherever a file of a sharded checkpoint is truncated, the previous checkpoint is chosen."""
    good = save(tmp_path / "good.ckpt", step=3)
    sharded = save_sharded(tmp_path / "sharded.ckpt", step=4)
    whole = (sharded / name).read_bytes()
    for size in {*range(0, len(whole), max(1, len(whole) // 50)), len(whole) - 1}:
        (sharded / name).write_bytes(whole[:size])
        assert newest_path(tmp_path) == good, size
    (sharded / name).write_bytes(whole)
    assert newest_path(tmp_path) == sharded


def test_a_folder_of_another_kind_is_passed_over(tmp_path, warnings_of):
    """A folder of unknown format is reported, and its contents are not searched for checkpoints."""
    save(tmp_path / "other.ckpt" / "checkpoint" / "inner.ckpt", step=9)
    assert newest_path(tmp_path) is None
    assert "other.ckpt is a folder without .metadata: an incomplete sharded checkpoint" in warnings_of()[0]


# ---- DeepSpeed checkpoints


def save_deepspeed(path, *, stage=2, num_ranks=2, **contents):
    """Write a checkpoint as DeepSpeed 0.18 does for Lightning: rank 0's model states contain the Trainer's state."""
    checkpoint = a_checkpoint(**contents)
    del checkpoint["state_dict"], checkpoint["optimizer_states"]
    engine = {"module": {"weight": torch.ones(20, 10)}, "dp_world_size": num_ranks, "mp_world_size": 1}
    engine |= {"ds_config": {"zero_optimization": {"stage": stage}} if stage else {}}
    engine |= {"param_shapes": [{"weight": torch.Size([20, 10])}] if stage else None}
    folder = path / "checkpoint"
    folder.mkdir(parents=True)
    for rank in range(num_ranks):
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3 or rank == 0:
            name = f"{prefix if stage == 3 else 'mp_rank_00'}_model_states.pt"
            torch.save({**engine, **checkpoint}, folder / name)
        if stage:
            torch.save({"optimizer_state_dict": torch.ones(200)}, folder / f"bf16_{prefix}_optim_states.pt")
    (path / "latest").write_text("checkpoint")
    return path


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_whole_deepspeed_checkpoint_is_taken(tmp_path, warnings_of, stage):
    """At any ZeRO stage, the folder is one checkpoint with the Trainer's progress and is compared with files."""
    save(tmp_path / "file.ckpt", step=3)
    folder = save_deepspeed(tmp_path / "deepspeed.ckpt", stage=stage, step=4)
    assert newest_path(tmp_path) == folder
    save(tmp_path / "later.ckpt", step=5)
    assert newest_path(tmp_path) == tmp_path / "later.ckpt"
    assert warnings_of() == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("latest", "is a folder without .metadata"),
        ("checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt", "has no model states of rank 0 in its subfolder"),
        ("checkpoint/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "has the optimizer states of only 1 of 2 ranks"),
    ],
)
def test_a_deepspeed_checkpoint_without_a_file_is_passed_over(tmp_path, warnings_of, name, fault):
    """A DeepSpeed checkpoint needs the files of all ranks, and the warning names the missing one."""
    good = save(tmp_path / "good.ckpt", step=3)
    folder = save_deepspeed(tmp_path / "deepspeed.ckpt", stage=3, step=4)
    (folder / name).unlink()
    assert newest_path(tmp_path) == good
    (warning,) = warnings_of()
    assert f"{folder} {fault}" in warning


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_deepspeed_checkpoint_with_a_truncated_file_is_never_taken(tmp_path, warnings_of, kind):
    """A truncated shard of any rank invalidates the checkpoint."""
    good = save(tmp_path / "good.ckpt", step=3)
    folder = save_deepspeed(tmp_path / "deepspeed.ckpt", stage=3, step=4)
    (file,) = folder.glob(f"checkpoint/*rank_1_*{kind}_states.pt")
    file.write_bytes(file.read_bytes()[:-100])
    assert newest_path(tmp_path) == good
    assert f"{folder} is damaged: {file.name} cannot be read" in warnings_of()[0]


# ---- links


def test_links_to_the_outside_are_ignored(tmp_path, warnings_of):
    """Links to files and folders outside and dangling links are not followed."""
    folder, outside = tmp_path / "ck", tmp_path / "outside"
    save(outside / "far.ckpt", step=9)
    good = save(folder / "good.ckpt", step=1)
    (folder / "file.ckpt").symlink_to(outside / "far.ckpt")
    (folder / "folder").symlink_to(outside)
    (folder / "gone.ckpt").symlink_to("gone")
    assert newest_path(folder) == good
    assert warnings_of() == []


def test_a_link_inside_stands_for_its_file(tmp_path, warnings_of):
    """Links of ModelCheckpoint(save_last="link") give way to their files; the folder itself may be a link."""
    train(tmp_path / "real", save_last="link")
    assert (tmp_path / "real" / "last.ckpt").is_symlink()
    (tmp_path / "ck").symlink_to(tmp_path / "real")
    assert newest_path(tmp_path / "ck") == tmp_path / "ck" / "step=4.ckpt"
    assert warnings_of() == []


# ---- other jobs


def test_facts_of_a_job_go_into_checkpoints():
    """A checkpoint contains the job's name, its S3 address and the fit, loadable with weights_only."""
    fit = {"place": "train.py:10", "repeat": 1, "order": 1, "number": 2}
    expected = {"name": "job-1", "checkpoint_s3_uri": "s3://bucket/ck", "fit": fit}
    assert job_facts(a_job(), a_fit(number=2)) == expected
    assert job_facts(a_job(None, None), a_fit(number=2)) == {**expected, "name": None, "checkpoint_s3_uri": None}


def test_only_checkpoints_of_the_same_fit_are_taken(tmp_path, warnings_of):
    """A script that trains twice resumes each fit from that fit's checkpoints, or from ones without a known fit."""
    first = save(tmp_path / "first.ckpt", step=1, facts=job_facts(a_job(), a_fit()))
    save(tmp_path / "second.ckpt", step=2, facts=job_facts(a_job(), a_fit("train.py:20", order=2)))
    assert newest_path(tmp_path, a_job(), fit=a_fit()) == first
    assert warnings_of() == []
    assert newest_path(tmp_path, a_job(), fit=a_fit(number=2)) is None
    unknown = save(tmp_path / "unknown.ckpt", step=3)
    save(tmp_path / "strange.ckpt", step=4, facts={**job_facts(a_job(), a_fit()), "fit": {"place": 5}})
    assert newest_path(tmp_path, a_job(), fit=a_fit()) == tmp_path / "strange.ckpt"
    (tmp_path / "strange.ckpt").unlink()
    assert newest_path(tmp_path, a_job(), fit=a_fit()) == first
    first.unlink()
    assert newest_path(tmp_path, a_job(), fit=a_fit()) == unknown


def test_a_checkpoint_of_the_same_job_comes_first(tmp_path):
    """This job's checkpoint is preferred over one with more progress from another or an unknown job."""
    before = save(tmp_path / "before.ckpt", step=4, facts=job_facts(a_job("job-0"), a_fit()))
    save(tmp_path / "old.ckpt", step=3)
    assert not newest_checkpoint(tmp_path, a_job()).is_of(a_job())
    own = save(tmp_path / "own.ckpt", step=1, facts=job_facts(a_job(), a_fit()))
    assert newest_checkpoint(tmp_path, a_job()).is_of(a_job())
    assert (newest_path(tmp_path, a_job()), newest_path(tmp_path)) == (own, before)


@pytest.mark.parametrize(
    ("facts", "is_taken"),
    [
        (None, True),  # written by a version without facts
        (a_job(), True),  # a restart
        (a_job(uri="s3://elsewhere"), True),  # the name is unique
        (a_job("job-0"), True),  # continued on purpose
        (a_job("job-0", "s3://bucket/ck/"), True),
        (a_job("job-0", "s3://bucket/other"), False),
        (a_job("job-0", None), False),
        (a_job(None, "s3://bucket/ck/"), True),  # only the address tells jobs apart
        (a_job(None, "s3://bucket/other"), False),
        (a_job(None, None), False),
    ],
)
def test_checkpoints_of_another_job_with_another_address_are_left_over(tmp_path, warnings_of, facts, is_taken):
    """A checkpoint is skipped if both its job's name and its S3 address differ, and the warning names both jobs."""
    mine = save(tmp_path / "mine.ckpt", step=1)
    other = save(tmp_path / "other.ckpt", step=2, facts=facts and job_facts(facts, a_fit()))
    assert newest_path(tmp_path, a_job()) == (other if is_taken else mine)
    assert newest_path(tmp_path) == other
    found = warnings_of()
    assert len(found) == (not is_taken)
    for warning in found:
        assert f"is left over from job {facts.name!r} (checkpoint_s3_uri=" in warning
        assert "this is job 'job-1' (checkpoint_s3_uri='s3://bucket/ck')" in warning


@pytest.mark.parametrize(
    ("facts", "job", "is_taken"),
    [
        (a_job("job-0", None), a_job(uri=None), False),  # two jobs without an address do not share one
        (a_job(None, None), a_job(uri=None), False),
        (a_job(None, None), a_job(None, None), True),  # nothing tells them apart
        (a_job("job-0", "s3://bucket/ck"), a_job(None), True),
        (a_job("job-0", "s3://bucket/other"), a_job(None), False),
        (a_job("job-0", None), a_job(None, None), False),
    ],
)
def test_without_name_and_address_a_checkpoint_is_of_another_job(tmp_path, facts, job, is_taken):
    """A checkpoint linked to this job neither by name nor by address is skipped, and none of its code runs."""
    mark = tmp_path / "mark"
    harmful = {**a_checkpoint(step=2, facts=job_facts(facts, a_fit())), "hyper_parameters": {"x": _Harmful(mark)}}
    path = save(tmp_path / "other.ckpt", harmful)
    assert newest_path(tmp_path, job) == (path if is_taken else None)
    assert not mark.exists()


def test_only_leftovers_start_from_the_beginning(tmp_path, warnings_of):
    """Training starts from the beginning if all checkpoints, files or sharded, belong to another job."""
    facts = job_facts(a_job("job-0", "s3://bucket/other"), a_fit())
    save(tmp_path / "other.ckpt", step=2, facts=facts)
    save_sharded(tmp_path / "sharded.ckpt", step=3, facts=facts)
    assert newest_path(tmp_path, a_job()) is None
    first, second, third = warnings_of()
    assert "other.ckpt is left over" in first
    assert "sharded.ckpt is left over" in second
    assert _BEGINNING in third


class Together:
    """Hosts that call newest_checkpoint at the same time, each with its own folder."""

    def __init__(self, *folders):
        self._folders = folders
        self._barrier = threading.Barrier(len(folders), timeout=30)
        self._values = [None] * len(folders)

    def newest(self, **options):
        """The results of all hosts."""
        with ThreadPoolExecutor(len(self._folders)) as pool:
            calls = [
                pool.submit(newest_checkpoint, folder, gather=partial(self._gather, host), **options)
                for host, folder in enumerate(self._folders)
            ]
            return [call.result(60) for call in calls]

    def _gather(self, host, value):
        self._values[host] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered


def test_hosts_choose_from_what_any_of_them_has(tmp_path):
    """All hosts choose the same checkpoint and the host that has it; among equal ones, the first host's."""
    main = save(tmp_path / "0" / "a.ckpt", step=3)
    other = save(tmp_path / "1" / "b.ckpt", step=5)
    found = Together(tmp_path / "0", tmp_path / "1", tmp_path / "none").newest()
    assert [(one.path, one.host) for one in found] == [(other, 1)] * 3
    save(tmp_path / "0" / "c.ckpt", step=5)
    found = Together(tmp_path / "0", tmp_path / "1").newest()
    assert [(one.path, one.host) for one in found] == [(main.with_name("c.ckpt"), 0)] * 2


def test_a_file_that_one_host_has_overwritten_counts_for_the_others(tmp_path, monkeypatch):
    """If one host overwrote a file that others downloaded under the same name, the newer copy counts on all hosts."""
    stale, fresh = (save(tmp_path / str(host) / "last.ckpt", step=3 + host) for host in range(2))
    read = find_newest._read
    # Give both files the same path, as on the hosts of a job.
    monkeypatch.setattr(
        find_newest, "_read", lambda path, *rest: replace(read(path, *rest), path=Path("/ck/last.ckpt"))
    )
    found = Together(stale.parent, fresh.parent).newest()
    assert [(one.progress[0], one.host) for one in found] == [(4, 1)] * 2


def test_a_checkpoint_that_is_damaged_on_any_host_is_passed_over(tmp_path, warnings_of):
    """Each host verifies its copy's checksums: copies are considered equal by their lists of checksums alone."""
    for host in range(2):
        save(tmp_path / str(host) / "a.ckpt", step=1)
    newest_file = save(tmp_path / "1" / "b.ckpt", step=2)
    data = bytearray(newest_file.read_bytes())
    with zipfile.ZipFile(newest_file) as archive:
        (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith("data/0")]
    data[entry.header_offset + 200] ^= 64
    newest_file.write_bytes(data)
    found = Together(tmp_path / "0", tmp_path / "1").newest()
    assert [one.progress[0] for one in found] == [1, 1]
    assert any(f"{newest_file} is damaged" in warning for warning in warnings_of())
