"""What a DataModule on a data host sees as its Trainer."""

import pytest

from lightning_sm.data.host.datamodule import TrainerFacts
from lightning_sm.data.protocol.spec import TRAINER_FACTS


def test_facts_of_the_trainer_are_there():
    """Epoch, steps and sizes are those of the trainers; the rank is 0, because one data host serves all ranks."""
    facts = TrainerFacts({name: number for number, name in enumerate(TRAINER_FACTS)})
    assert [getattr(facts, name) for name in TRAINER_FACTS] == list(range(len(TRAINER_FACTS)))
    assert (facts.global_rank, facts.local_rank, facts.node_rank, facts.is_global_zero) == (0, 0, 0, True)


def test_a_missing_fact_is_none():
    """Without a Trainer there are no values."""
    assert TrainerFacts({}).max_epochs is None


def test_anything_else_says_what_to_do():
    """The error names the attribute, the available ones, and what to do."""
    with pytest.raises(AttributeError, match=r"self.trainer.model is not available on a data host, only current_epoch"):
        _ = TrainerFacts({}).model
