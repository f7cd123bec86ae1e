"""What stands for a value of the last stage's step on other ranks."""

import copy
import pickle

import numpy as np
import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.last_stage_value import LastStageValue

VALUE = LastStageValue(torch.ones(4, 9), 'outputs["logits"]', "training_step")


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value.argmax(1),
        lambda value: value.shape,
        lambda value: hasattr(value, "detach"),
        lambda value: value + 1,
        lambda value: 1 - value,
        lambda value: value[0],
        list,
        len,
        lambda value: 3 in value,
        float,
        bool,
        lambda value: value == torch.ones(4, 9),
        lambda value: torch.ones(4, 9) == value,
        lambda value: torch.ones(4, 9) @ value,
        lambda value: value > 0,
        lambda value: -value,
        lambda value: torch.softmax(value, dim=1),
        lambda value: torch.cat([torch.ones(4, 9), value]),
        np.asarray,
        np.mean,
    ],
)
def test_a_use_is_an_error_with_the_remedy(use):
    """Of the value itself, as an operand, and as an argument of a function of torch or NumPy."""
    with pytest.raises(StrategyError) as error:
        use(VALUE)
    assert str(error.value) == (
        'outputs["logits"] of training_step, a tensor of shape (4, 9), stays on the rank of the last stage of the '
        "pipeline, and is used on another one. Set outputs: all of the strategy, with which each rank runs the whole "
        "step."
    )


def test_it_can_be_kept_copied_and_sent():
    """As Lightning and callbacks do with the results of steps that they do not look into."""
    sent = pickle.loads(pickle.dumps(VALUE))  # noqa: S301  # pickled right here
    for one in (copy.copy(VALUE), copy.deepcopy(VALUE), sent):
        assert repr(one) == repr(VALUE)
    assert apply_to_collection({"logits": VALUE}, torch.Tensor, torch.Tensor.detach) == {"logits": VALUE}
    assert len({VALUE, VALUE}) == 1


def test_other_objects_are_named_by_their_type():
    """Only a tensor has a shape."""
    assert repr(LastStageValue([1], "outputs", "test_step")).startswith("<outputs of test_step, list, stays on")
