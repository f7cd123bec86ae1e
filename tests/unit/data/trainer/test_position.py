"""A Trainer's position in the data: where a pass starts and ends, and what a checkpoint keeps of it."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.trainer.states import TrainerFn

from lightning_sm._lightning import CombinedLoader
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, Position
from lightning_sm.data.protocol.spec import FIRST_BY_HAND, LoaderDescription
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.position import (
    Progress,
    batches_taken,
    combined_loader_of,
    position_of,
    reach,
    step_limit,
)
from lightning_sm.data.trainer.resume import LoaderPosition, SamplerOrderId, SavedPosition
from lightning_sm.errors import ResumeError

NO_LIMIT = float("inf")


def make_loader(stage="train", *, order="shuffled", num_samples=40, batch_size=4, index=0, client=None, shards=1):
    """A loader of ten batches."""
    description = LoaderDescription(f"{stage}_dataloader()", order, num_samples, batch_size, False, "i", "f", "Numbers")
    limits = {"window_batches": 8, "window_bytes": 1 << 20, "max_batch_bytes": 1 << 20, "timeout_s": 60.0}
    place = LoaderPlace(f"1/fit/{stage}/{index}", index, stage, 0, 1, seed=3, num_shards=shards, **limits)
    return RemoteLoader(client, description, place, None, None)


class Run:
    """A Trainer with loaders on data hosts, within an epoch."""

    def __init__(self, *loaders, mode="max_size_cycle", batches=10, epoch=0, taken=0, **options):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        self.trainer = Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)
        self.trainer.strategy._lightning_module = SimpleNamespace(automatic_optimization=True)
        self.fit = self.trainer.fit_loop
        self.fit.max_batches = batches
        epochs = self.fit.epoch_progress.current
        epochs.ready = epochs.started = epoch + 1
        epochs.processed = epoch
        self.batches = self.fit.epoch_loop.batch_progress
        self.batches.current.processed = taken
        self.combined = CombinedLoader(list(loaders), mode)
        self.fit._combined_loader = self.combined
        self.progress = Progress()
        self.progress.follow(loaders)
        self.trainer.datamodule = SimpleNamespace(_hosts=SimpleNamespace(progress=self.progress))

    def start(self, combined=None):
        """The Trainer's next pass over its first loader."""
        combined = combined or self.combined
        iter(combined)
        return combined._iterator.iterators[0]

    def steps(self, number):
        """Note that so many optimizer steps were taken."""
        self.fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = number

    def save(self):
        """The entries of a checkpoint."""
        checkpoint = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [], "other": 1}}}}
        self.progress.on_save_checkpoint(self.trainer, None, checkpoint)
        return checkpoint


# ---- Where a pass starts


def test_without_a_trainer_a_pass_is_the_first_of_its_epoch():
    """The epoch is the one that was announced to the sampler, if any was."""
    loader = make_loader()
    assert position_of(loader, iter(loader), None) == Position(0)
    loader.set_epoch(3)
    assert position_of(loader, iter(loader), None) == Position(3)
    loader.set_epoch(-1)
    assert position_of(loader, iter(loader), None) == Position(0)


def test_a_pass_of_the_trainer_starts_behind_what_was_trained_on():
    """Epoch and batch are those of the Trainer's progress, which a checkpoint has restored."""
    loader = make_loader()
    run = Run(loader, batches=7, epoch=2, taken=5, limit_train_batches=7)
    assert position_of(loader, run.start(), run.trainer) == Position(2, 0, 5, 7, earlier_stop_step=7)


@pytest.mark.parametrize(
    ("num_samples", "mode", "limit", "taken", "expected"),
    [
        (40, "max_size_cycle", 10, 0, (0, 0, 10)),
        (40, "max_size_cycle", 10, 4, (0, 4, 10)),
        (40, "max_size_cycle", 7, 4, (0, 4, 7)),
        (40, "max_size_cycle", 3, 5, (0, 5, 5)),
        (40, "max_size_cycle", NO_LIMIT, 4, (0, 4, None)),
        (16, "max_size_cycle", 10, 4, (1, 0, 6)),
        (16, "max_size_cycle", 10, 9, (2, 1, 2)),
        (16, "max_size", 10, 3, (0, 3, 10)),
        (16, "max_size", 10, 9, (0, 4, 5)),
        (0, "max_size_cycle", NO_LIMIT, 0, (0, 0, None)),
        (4, "max_size_cycle", NO_LIMIT, 2, (2, 0, None)),
        (None, "max_size_cycle", 9, 4, (0, 4, 9)),
        (None, "max_size_cycle", NO_LIMIT, 4, (0, 4, None)),
    ],
)
def test_a_short_loader_starts_again_where_loaders_cycle(num_samples, mode, limit, taken, expected):
    """Which pass of the epoch it is, its first batch, and its end: where the Trainer's limit is, if there is one."""
    loader = make_loader(order="shards" if num_samples is None else "shuffled", num_samples=num_samples, shards=16)
    loader.num_passes = 1
    run = Run(loader, mode=mode, batches=limit, epoch=1, taken=taken)
    position = position_of(loader, run.start(), run.trainer)
    assert position.epoch == 1
    assert (position.pass_index, position.first_step, position.stop_step) == expected


@pytest.mark.parametrize(
    ("order", "batches", "expected"),
    [("sampler", NO_LIMIT, 12), ("batch_sampler", NO_LIMIT, 12), ("shuffled", NO_LIMIT, None), ("sampler", 9, 9)],
)
def test_a_users_sampler_runs_one_batch_farther_than_max_steps(order, batches, expected):
    """Lightning looks one batch ahead, to tell the end of the data from that of the training."""
    client = SimpleNamespace(length=lambda *_: SimpleNamespace(is_cut=False, num_steps=100))
    loader = make_loader(order=order, client=client)
    loader.num_passes = 1
    run = Run(loader, batches=batches, taken=3, max_steps=10, accumulate_grad_batches=2)
    run.steps(6)
    assert position_of(loader, run.start(), run.trainer).stop_step == expected
    run.fit.epoch_loop.max_steps = -1
    assert position_of(loader, run.start(), run.trainer).stop_step == (None if batches == NO_LIMIT else 9)


@pytest.mark.parametrize(
    ("order", "overfit_batches", "epoch"),
    [("batch_sampler", 1, 0), ("batch_sampler", 0, 2), ("shuffled", 1, 2), ("sampler", 1, 2)],
)
def test_overfitting_stays_with_the_batches_of_the_first_epoch(order, overfit_batches, epoch):
    """A batch sampler may choose other samples in each epoch; Lightning replaces the other samplers."""
    loader = make_loader(
        order=order, client=SimpleNamespace(length=lambda *_: SimpleNamespace(is_cut=False, num_steps=10))
    )
    run = Run(loader, epoch=2, overfit_batches=overfit_batches)
    assert position_of(loader, run.start(), run.trainer).epoch == epoch


def test_passes_of_the_user_have_numbers_of_their_own():
    """A loop over the Trainer's loader reads all of it, in another order than the Trainer's pass."""
    loader = make_loader()
    run = Run(loader, epoch=2, taken=5, limit_train_batches=7)
    run.start()
    positions = [position_of(loader, iter(loader), run.trainer) for _ in range(2)]
    assert positions == [
        Position(2, FIRST_BY_HAND + number, is_manual_iteration=True, earlier_stop_step=7) for number in (0, 1)
    ]


def test_the_trainers_loaders_are_told_from_those_of_the_user():
    """Also in combined loaders within others, and in each loop."""
    loader = make_loader()
    run = Run(loader)
    assert combined_loader_of(iter(loader), run.trainer) is None
    assert combined_loader_of(run.start(), run.trainer) is run.combined
    outer = CombinedLoader([CombinedLoader([loader], "min_size"), make_loader()], "min_size")
    trainer = run.trainer
    for loop in (run.fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop._combined_loader = outer
        (one, other) = (iter(outer), outer._iterator.iterators)[1]
        assert combined_loader_of(other, trainer) is outer
        assert combined_loader_of(one._iterator.iterators[0], trainer) is outer
        loop._combined_loader = None
        assert combined_loader_of(other, trainer) is None


@pytest.mark.parametrize(
    ("is_restarting", "is_last", "started", "expected"),
    [
        (False, False, 2, (2, 0)),
        (False, True, 2, (2, 0)),
        (True, False, 3, (2, 5)),
        (True, True, 3, (3, 0)),
        (True, True, 2, (2, 0)),
    ],
)
def test_the_first_pass_of_a_loader_without_length_knows_what_is_not_reset_yet(
    is_restarting, is_last, started, expected
):
    """Lightning fetches its first batch before it has reset the progress of the epoch before.

    A checkpoint at the end of an epoch may count that epoch as processed, or not yet.
    """
    loader = make_loader(order="shards", num_samples=None, shards=16)
    run = Run(loader, batches=NO_LIMIT, epoch=2, taken=5)
    run.fit.restarting = is_restarting
    run.batches.is_last_batch = is_last
    run.fit.epoch_progress.total.started, run.fit.epoch_progress.total.processed = started, 2
    iterator = run.start()
    position = position_of(loader, iterator, run.trainer)
    assert (position.epoch, position.first_step) == expected
    loader.num_passes = 1
    later = position_of(loader, iterator, run.trainer)
    assert (later.epoch, later.first_step) == (2, 5)
    loader.num_passes = 0
    run.fit.max_batches = 10
    assert position_of(loader, iterator, run.trainer).first_step == 5


# ---- Where a pass of an evaluation ends


class Evaluation(Run):
    """A validation over two loaders within a fit."""

    def __init__(self, mode, limits, **options):
        self.loaders = [make_loader("val", index=0), make_loader("val", index=1)]
        super().__init__(make_loader(), epoch=2, taken=5, **options)
        self.loop = self.fit.epoch_loop.val_loop
        self.loop._max_batches = limits
        self.evaluated = CombinedLoader(self.loaders, mode)
        self.loop._combined_loader = self.evaluated
        self.trainer.state.fn = TrainerFn.FITTING

    def position(self, number):
        """Where the pass over a loader starts and ends."""
        for iterator in self.evaluated._iterator.iterators:
            if iterator._loader is self.loaders[number]:
                return position_of(self.loaders[number], iterator, self.trainer)
        raise AssertionError("this loader is not being read")


@pytest.mark.parametrize(
    ("mode", "limits", "expected"),
    [
        ("min_size", [3, 5], [5, 5]),
        ("min_size", [5, 3], [5, 5]),
        ("min_size", [3, NO_LIMIT], [None, None]),
        ("min_size", [], [None, None]),
        ("sequential", [3, 5], [3]),
        ("sequential", [NO_LIMIT, 5], [None]),
    ],
)
def test_loaders_that_are_evaluated_together_end_with_the_longest(mode, limits, expected):
    """One after the other, each ends with its own limit."""
    run = Evaluation(mode, limits, limit_val_batches=4)
    iter(run.evaluated)
    positions = [run.position(number) for number in range(len(expected))]
    assert positions == [Position(2, 0, 0, stop, earlier_stop_step=4) for stop in expected]


def test_the_second_loader_has_its_own_limit():
    """Its place among the loaders counts, not when it is read."""
    run = Evaluation("sequential", [3, 5])
    iter(run.evaluated)
    run.evaluated._iterator._iterator_idx = 1
    run.evaluated._iterator._load_current_iterator()
    assert run.position(1).stop_step == 5


def test_a_loader_that_is_restarted_within_an_evaluation_counts_its_passes():
    """A combined loader that cycles reads a short one again; the next evaluation begins with the first pass."""
    run = Evaluation("max_size_cycle", [3, 5])
    iter(run.evaluated)
    assert [run.position(0).pass_index for _ in range(3)] == [0, 1, 2]
    iter(run.evaluated)
    assert run.position(0).pass_index == 0


def test_a_sanity_check_has_limits_of_its_own():
    """It reads fewer batches than a validation."""
    run = Evaluation("min_size", [7, 9], num_sanity_val_steps=2)
    iter(run.evaluated)
    assert run.position(0).stop_step == 9
    run.trainer.sanity_checking = True
    assert run.position(0).stop_step == 2


# ---- Limits


def test_a_limit_is_a_number_of_batches():
    """A fraction is none, which only the length of the loader turns into one; each stage has its own."""
    trainer = Run(limit_train_batches=7, limit_val_batches=0.5, limit_test_batches=3).trainer
    assert [step_limit(make_loader(stage), trainer) for stage in ("train", "val", "test")] == [7, None, 3]
    assert step_limit(make_loader(), None) is None


def test_how_far_a_trainer_can_read():
    """To the user's limit, or in a training to max_steps."""
    run = Run(taken=5, max_steps=10, accumulate_grad_batches=2)
    run.steps(7)
    assert reach(make_loader(), run.trainer) == 5 + 6
    assert reach(make_loader("val"), run.trainer) is None
    assert reach(make_loader(), None) is None
    assert reach(make_loader(), Run(limit_train_batches=4, max_steps=10).trainer) == 4
    assert reach(make_loader(), Run(max_epochs=1).trainer) is None


def test_batches_until_max_steps():
    """As many as the steps that are left accumulate; unknown where the user's code decides when to step."""
    run, loader = Run(max_steps=10, accumulate_grad_batches=3, taken=4), make_loader()
    assert (reach(loader, run.trainer), batches_taken(run.trainer)) == (4 + 30, 4)
    for steps, left in ((9, 3), (10, 0), (11, 0)):
        run.steps(steps)
        assert reach(loader, run.trainer) == 4 + left
    run.fit.epoch_loop.max_steps = 0
    assert reach(loader, run.trainer) == 4
    run.fit.epoch_loop.max_steps = -1
    assert reach(loader, run.trainer) is None
    manual = Run(max_steps=10)
    manual.trainer.lightning_module.automatic_optimization = False
    assert reach(loader, manual.trainer) is None


# ---- What a checkpoint keeps


def saved(batches, *loaders, epoch=3):
    """A position in a checkpoint."""
    described = [LoaderPosition.of(loader.description, 1, loader.place.num_shards, loader.order) for loader in loaders]
    return SavedPosition(seed=3, epoch=epoch, batches=batches, loaders=tuple(described))


def test_a_checkpoint_has_the_position():
    """Seed, epoch, batch and loaders; the states of loaders, which Lightning would want back, are left out."""
    ordered = make_loader(order="sampler", index=1)
    ordered.order = SamplerOrderId(0, 12, "d")
    loaders = make_loader(), ordered
    run = Run(*loaders, epoch=3, taken=5)
    assert run.save() == {
        "lightning_sm.data": saved(5, *loaders).to_json(),
        "loops": {"fit_loop": {"state_dict": {"other": 1}}},
    }
    run.batches.is_last_batch = True
    assert run.save()["lightning_sm.data"] == saved(0, *loaders).to_json()


@pytest.mark.parametrize("case", ["no loaders", "no hosts", "other hosts"])
def test_a_checkpoint_of_another_datamodule_is_left_alone(case):
    """A Trainer may train on a DataModule without data hosts later."""
    run = Run(*[] if case == "no loaders" else [make_loader()])
    if case != "no loaders":
        run.trainer.datamodule = (
            None if case == "no hosts" else SimpleNamespace(_hosts=SimpleNamespace(progress=Progress()))
        )
    assert run.save() == {"loops": {"fit_loop": {"state_dict": {"combined_loader": [], "other": 1}}}}


def resumed(run, checkpoint, *, is_restarting=True):
    """Load a checkpoint in a run, and resume from it."""
    run.progress.on_load_checkpoint(run.trainer, None, checkpoint)
    run.fit.restarting = is_restarting
    run.progress.resume(run.trainer)
    return run


def said(caplog):
    """What was logged of positions, with its level; it is forgotten."""
    name = "lightning_sm.data.trainer.position"
    records = [record for record in caplog.records if record.name == name]
    caplog.clear()
    return [(record.levelno, record.getMessage()) for record in records]


def test_the_batches_of_the_epoch_are_converted(caplog):
    """With half the batch size, twice as many batches are done; counters that are ahead or behind stay so."""
    run = Run(make_loader(batch_size=4), epoch=3, taken=5)
    current = run.batches.current
    current.ready, current.started, current.completed = 6, 6, 4
    resumed(run, {"lightning_sm.data": saved(5, make_loader(batch_size=8)).to_json()})
    assert run.progress.origin.batches == 5
    assert (current.ready, current.started, current.processed, current.completed) == (11, 11, 10, 9)
    ((level, text),) = said(caplog)
    assert level == logging.WARNING
    assert "batch 5 of epoch 4, which is batch 10 with the current ranks (1)" in text
    assert text.endswith("Samples that repeat: 0.")
    run.progress.resume(run.trainer)
    assert (current.ready, said(caplog)) == (11, []), "it was converted already"


def test_an_epoch_may_begin_again():
    """With larger batches, it continues before the sample where it stopped; no counter becomes negative."""
    run = Run(make_loader(batch_size=16), epoch=3, taken=1)
    current = run.batches.current
    current.ready, current.started, current.completed = 1, 1, 0
    resumed(run, {"lightning_sm.data": saved(1, make_loader(batch_size=8)).to_json()})
    assert (current.ready, current.started, current.processed, current.completed) == (0, 0, 0, 0)
    run.progress.begin_run()
    assert run.progress.origin is None


def test_the_same_batches_need_no_conversion(caplog):
    """Nothing is said, and no counter changes."""
    run = resumed(
        Run(make_loader(), epoch=3, taken=5), {"lightning_sm.data": saved(5, make_loader()).to_json(), "loops": {}}
    )
    assert (run.batches.current.processed, said(caplog)) == (5, [])


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_fit_that_does_not_resume_converts_nothing(is_foreign):
    """A checkpoint that was only read for its weights is no position; nor is it one for the next fit."""
    run = Run(make_loader(batch_size=4), epoch=3, taken=5)
    checkpoint = {"lightning_sm.data": saved(5, make_loader(batch_size=8)).to_json()}
    resumed(run, foreign(5) if is_foreign else checkpoint, is_restarting=False)
    run.fit.restarting = True
    run.progress.resume(run.trainer)
    assert run.batches.current.processed == 5


def foreign(taken, *, is_last=False):
    """A checkpoint of a run without data hosts."""
    progress = {"is_last_batch": is_last, "current": {"processed": taken}}
    return {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}


def test_an_epoch_that_began_without_data_hosts_continues(caplog):
    """With the next batch, and a line says so; at the end of an epoch there is nothing to say."""
    run = resumed(Run(make_loader(order="sequential"), epoch=3, taken=5), foreign(5))
    assert run.batches.current.processed == 5
    ((level, text),) = said(caplog)
    assert level == logging.WARNING
    assert "saved without data hosts, after batch 5 of an epoch" in text
    with pytest.raises(ResumeError, match="after batch 5 of an epoch"):
        resumed(Run(make_loader()), foreign(5))
    resumed(Run(make_loader()), foreign(5, is_last=True))
    resumed(Run(make_loader()), foreign(0))
    resumed(Run(make_loader()), {"state_dict": {}})
    assert said(caplog) == []


def test_the_order_of_a_sampler_is_asked_for_again():
    """For the pass and the cut of the checkpoint: the same sampler must give the rest of the same order."""
    asked = []

    def length(place, description, position):
        asked.append(position)
        return SimpleNamespace(digest="d")

    old = make_loader(order="sampler")
    old.order = SamplerOrderId(1, 12, "d")
    new = make_loader(order="sampler", client=SimpleNamespace(length=length))
    run = resumed(Run(new, epoch=3, taken=5), {"lightning_sm.data": saved(5, old).to_json()})
    assert new.order == SamplerOrderId(1, 12, "d")
    assert asked == [Position(3, 1, order_stop=12)]
    assert run.batches.current.processed == 5
    old.order = SamplerOrderId(1, 12, "another")
    with pytest.raises(ResumeError, match=r"digest of its order: another\), .* order: d\)"):
        resumed(run, {"lightning_sm.data": saved(5, old).to_json()})


@pytest.mark.parametrize("case", ["end of an epoch", "no order", "another kind", "another loader"])
def test_no_order_is_asked_for_where_none_is_compared(case):
    """It costs a run of the sampler on a data host."""
    old = make_loader(order="sampler")
    if case != "no order":
        old.order = SamplerOrderId(0, 0, "d")
    loaders = [make_loader(order="shuffled" if case == "another kind" else "sampler")]
    if case == "another loader":
        loaders.insert(0, make_loader())
    batches = 0 if case == "end of an epoch" else 5
    checkpoint = {"lightning_sm.data": saved(batches, *[old] if case != "another loader" else []).to_json()}
    run = Run(*loaders, epoch=3, taken=batches)
    if case in ("another kind", "another loader"):
        with pytest.raises(ResumeError):
            resumed(run, checkpoint)
    else:
        resumed(run, checkpoint)
    assert [loader.order for loader in loaders] == [None] * len(loaders)


def test_a_copy_in_another_process_has_no_loaders():
    """Strategies that spawn pickle the Trainer; loaders belong to this process."""
    run = Run(make_loader())
    copied = pickle.loads(pickle.dumps(run.progress))  # noqa: S301 - our own
    assert vars(copied) == {**vars(run.progress), "_loaders": ()}
