"""The names of strategies on the command line."""

import pytest

from lightning_sm import SageMakerTrainer
from lightning_sm._lightning import StrategyRegistry
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.registry import register_strategies


def test_strategies_are_registered_as_often_as_a_trainer_is_made():
    """A script may make several Trainers, and a CLI: registering twice is no error."""
    register_strategies()
    register_strategies()

    assert "dp" in StrategyRegistry.available_strategies()


def test_data_parallel_names_the_strategy_that_replaced_it_and_what_becomes_of_the_batch():
    """A script of Lightning 1 with strategy=dp ends with what to write instead."""
    with pytest.raises(
        StrategyError, match=r"strategy=dp .* Use strategy=ddp .*: divide the DataModule's by the number"
    ):
        SageMakerTrainer(strategy="dp", accelerator="cpu", devices=2, logger=False)
