"""Skip the tests of this folder on machines without a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"needs an NVIDIA GPU; torch {torch.__version__} sees none on this machine")
