"""What PipelineParallelStrategy refuses before it connects to other ranks."""

from __future__ import annotations

import pytest

from lightning_sm import PipelineParallelStrategy
from lightning_sm.errors import StrategyError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ({"placement": "near"}, "placement='near' is not one of cluster, spread"),
        ({"split": "layers"}, "split='layers' is neither 'parameters' nor a list"),
        ({"process_group_backend": "smddp"}, "SMDDP has only one"),
    ],
)
def test_an_argument_that_is_not_valid_is_refused(arguments, message):
    """The error shows the value and the valid ones."""
    with pytest.raises(StrategyError) as caught:
        PipelineParallelStrategy(**arguments)
    assert message in str(caught.value)
