"""Statistics of the data service."""

import logging
from types import SimpleNamespace

from lightning_sm.data.trainer.metrics import LoaderStats
from lightning_sm.data.trainer.reporter import Reporter
from lightning_sm.errors import DataServiceError


def test_a_feeder_that_does_not_answer_costs_the_statistics_only(caplog):
    """A training, or a fit that has ended, goes on without them."""

    def state():
        raise DataServiceError("The feeder process did not answer within 10 s.")

    stats = LoaderStats()
    stats.num_batches = 1
    with caplog.at_level(logging.WARNING):
        Reporter(state).end_epoch(SimpleNamespace(stats=stats), SimpleNamespace())
    assert "no statistics of the data service: The feeder process did not answer" in caplog.text
