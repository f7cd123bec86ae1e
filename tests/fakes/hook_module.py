"""A DataModule whose hooks a test supplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader


class HookModule:
    """A DataModule whose hooks do what a test wants.

    Args:
        hooks: By their names: functions of the Trainer.
    """

    def __init__(self, **hooks: Callable[[Any], Any]) -> None:
        self.trainer: Any = None
        self._hooks = hooks

    def prepare_data(self) -> None:
        self._run("prepare_data")

    def setup(self, stage: str) -> None:
        self._run("setup")

    def teardown(self, stage: str) -> None:
        self._run("teardown")

    def train_dataloader(self) -> Any:
        return self._run("train_dataloader") or DataLoader(range(8))  # type: ignore[arg-type]  # a range is a dataset

    def _run(self, hook: str) -> Any:
        return self._hooks.get(hook, lambda _: None)(self.trainer)
