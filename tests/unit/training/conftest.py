"""Fixtures shared by the tests of the cluster environment and of the prepared process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_sm._lightning import rank_zero_only
from lightning_sm.job.rank_starter import RANK_VARIABLES
from lightning_sm.job.variables import RANK_ZERO_PID
from tests.fakes.process_state import restored_process
from tests.unit.job.test_rank_starter import MPI, TORCHRUN


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear rank variables, and restore what the test changes in this process afterwards."""
    for name in (*RANK_VARIABLES, *TORCHRUN, *MPI, RANK_ZERO_PID.name, "SM_CURRENT_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    with restored_process():
        yield
