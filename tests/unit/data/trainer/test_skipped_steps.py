"""Steps are left out on all ranks alike, or the run stops before it trains."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pytorch_lightning import LightningDataModule

from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.data_hosts import DataHosts
from lightning_sm.errors import DataSettingsError


@pytest.mark.parametrize(("own", "main"), [(["3-4"], None), (None, ["3-4"]), (["3-4"], ["3-5"])])
def test_ranks_with_other_steps_are_refused(own, main):
    """Also where one of them leaves out none: the error names both, and the rank."""
    steps = DataServiceSettings(skip_steps=main).skipped_steps
    strategy = SimpleNamespace(broadcast=lambda values: (*values[:2], steps))
    data = LightningDataModule()
    data.trainer = SimpleNamespace(strategy=strategy, global_rank=1)
    connection = SimpleNamespace(settings=DataServiceSettings(skip_steps=own))
    with pytest.raises(DataSettingsError, match=r"skip_steps is .* on rank 1, but .* on rank 0\. Set it alike"):
        DataHosts(data, connection, seed=1).set_up("fit")
