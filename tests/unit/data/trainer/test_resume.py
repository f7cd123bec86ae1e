"""A position counts samples: it means the same for another number of ranks and another batch size."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.samples import SamplePlan
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.data.trainer.resume import LoaderPosition, SamplerOrderId, SavedPosition, check_foreign
from lightning_sm.errors import ResumeError


def loader(
    batch_size=8, ranks=1, *, name="train_dataloader()", identity="i", order="shuffled", shards=0, sampler_order=None
):
    """A training loader on so many ranks."""
    description = LoaderDescription(
        name=name,
        order=order,
        num_samples=1000,
        batch_size=batch_size,
        drop_last=False,
        is_split=False,
        identity=identity,
        fingerprint="f",
        dataset=f"Images {identity}",
    )
    return LoaderPosition.of(description, ranks, shards, sampler_order)


def saved(batches, *loaders):
    """A position in the middle of epoch 3."""
    return SavedPosition(seed=5, epoch=3, batches=batches, loaders=loaders)


def test_it_survives_a_checkpoint():
    """What is read is what was written, through JSON and back."""
    drawn = loader(4, 2, name="b", order="sampler", sampler_order=SamplerOrderId(1, 160, "d"))
    position = saved(7, loader(), drawn)
    assert SavedPosition.from_json(json.loads(json.dumps(position.to_json()))) == position


@pytest.mark.parametrize(
    ("change", "why"),
    [({"epoch": "3"}, r"`int`, got `str` - at `\$.epoch`"), ({"loaders": [{"name": "a"}]}, "field `dataset`")],
)
def test_a_damaged_position_is_refused(change, why):
    """The error names the field, and says that the checkpoint is at fault."""
    with pytest.raises(ResumeError, match=f"position in the checkpoint is malformed: .*{why}"):
        SavedPosition.from_json({**saved(7, loader()).to_json(), **change})


def test_another_version_is_refused():
    """Both versions are named."""
    state = {**saved(7, loader()).to_json(), "version": 3}
    with pytest.raises(ResumeError, match="of version 3, but this lightning_sm reads version 1"):
        SavedPosition.from_json(state)


def test_the_number_of_shards_is_kept_where_the_ranks_can_share_them():
    """The first loader with shards decides; a number that does not divide evenly is not used."""
    position = saved(7, loader(), loader(8, 3, order="shards", shards=48))
    assert [position.num_shards(ranks) for ranks in (3, 16, 5)] == [48, 48, None]


@given(
    batches=st.integers(1, 40),
    old=st.tuples(st.integers(1, 16), st.integers(1, 8)),
    new=st.tuples(st.integers(1, 16), st.integers(1, 8)),
)
def test_no_sample_is_left_out(batches, old, new):
    """For any batch sizes and ranks, the new run begins at or before the sample where the old one stopped."""
    step, num_repeated = saved(batches, loader(*old)).batches_for([loader(*new)])
    consumed, global_batch = batches * old[0] * old[1], new[0] * new[1]
    assert step * global_batch + num_repeated == consumed
    assert 0 <= num_repeated < global_batch


@pytest.mark.parametrize(("size", "ranks"), [(16, 1), (8, 2), (4, 4), (2, 8)])
def test_the_same_global_batch_continues_with_the_same_samples(size, ranks):
    """Twice the ranks with half the batch size: the rest of the epoch has the same global batches."""
    order = list(range(0, 500, 3))
    (step, num_repeated), old = (
        saved(5, loader(16)).batches_for([loader(size, ranks)]),
        SamplePlan(order, 16, False, 0, 1),
    )
    plans = [SamplePlan(order, size, False, rank, ranks) for rank in range(ranks)]
    assert num_repeated == 0
    assert plans[0].num_steps == old.num_steps
    for number in range(step, old.num_steps):
        taken = [index for plan in plans for index in plan.batch(number).tolist()]
        expected = old.batch(number).tolist()
        # In the last step, 7 samples for 8 ranks, one repeats.
        assert taken[: len(expected)] == expected
        assert len(taken) == max(ranks, len(expected))


@given(
    size=st.integers(1, 200),
    old=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    new=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    data=st.data(),
)
def test_what_is_left_of_an_epoch_is_all_that_was_not_trained_on(size, old, new, data):
    """After any step, the last one included, the steps that follow have every sample that the old run has not had."""
    first, second = (
        [SamplePlan(range(size), batch_size, False, rank, ranks) for rank in range(ranks)]
        for batch_size, ranks in (old, new)
    )
    batches = data.draw(st.integers(1, first[0].num_steps))
    step, _ = saved(batches, loader(*old)).batches_for([loader(*new)])
    had, left = (
        {index for plan in plans for number in numbers for index in plan.batch(number).tolist()}
        for plans, numbers in ((first, range(batches)), (second, range(step, second[0].num_steps)))
    )
    assert had | left == set(range(size))
    if batches == first[0].num_steps:
        assert len(left) < new[0] * new[1]


def test_at_the_end_of_an_epoch_anything_may_change():
    """Nothing is left of the epoch, so that other data and other loaders are fine."""
    assert saved(0, loader()).batches_for([loader(identity="other"), loader(name="b")]) == (0, 0)


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ([loader(identity="other")], r"over Images i \(train_dataloader\(\), identity i\), .* serve Images other"),
        ([loader(), loader(name="b")], r"number of training loaders is 1, but now it is 2"),
    ],
)
def test_other_data_in_the_middle_of_an_epoch_is_refused(loaders, message):
    """What the checkpoint has and what there is are named."""
    with pytest.raises(ResumeError, match=message):
        saved(7, loader()).batches_for(loaders)


SAMPLER = {"order": "sampler", "sampler_order": SamplerOrderId(0, 0, "d")}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"order": "sequential"}, {"order": "shuffled"}, r"in its order, but now it is read shuffled"),
        (SAMPLER, {"order": "shuffled"}, r"in the order of a sampler \(digest of its order: d\), .* read shuffled"),
        (SAMPLER, {**SAMPLER, "sampler_order": SamplerOrderId(0, 0, "e")}, r"order: d\), .* order: e\). Resume with"),
    ],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused(old, new, message):
    """The rest of the epoch would repeat samples and leave out others; at its end, the order may change."""
    with pytest.raises(ResumeError, match=message):
        saved(7, loader(**old)).batches_for([loader(**new)])
    assert saved(0, loader(**old)).batches_for([loader(**new)]) == (0, 0)
    assert saved(7, loader(**old)).batches_for([loader(4, **old)]) == (14, 0)


@pytest.mark.parametrize(("order", "ranks"), [("shuffled", 1), ("sequential", 2), ("shards", 1)])
def test_an_epoch_that_began_without_data_hosts_in_another_order_is_refused(order, ranks):
    """Lightning shuffles on several ranks."""
    with pytest.raises(ResumeError, match=r"without data hosts, after batch 7 of an epoch.* at the end of an epoch"):
        check_foreign(7, [loader(order=order, shards=16)], ranks)


def test_an_epoch_that_began_without_data_hosts_in_the_order_of_the_data_continues():
    """It is the same order."""
    check_foreign(7, [loader(order="sequential")], 1)


def test_loaders_that_change_by_different_factors_are_refused():
    """They have one batch count in common, which cannot mean both."""
    with pytest.raises(ResumeError, match=r"with \[8, 8\] samples per step .*, but now there are \[8, 4\]"):
        saved(7, loader(), loader(name="b")).batches_for([loader(), loader(4, name="b")])


def test_shards_must_be_the_same():
    """A virtual shard of another number of shards is another part of the data."""
    old = loader(order="shards", shards=16)
    assert saved(7, old).batches_for([old]) == (7, 0)
    with pytest.raises(ResumeError, match=r"with 16 virtual shards, world size 1, batch size 8, but now it has 32"):
        saved(7, old).batches_for([loader(order="shards", shards=32)])
