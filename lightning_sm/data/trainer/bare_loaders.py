"""Loaders without a DataModule: those handed to ``fit``, and those that the LightningModule's own hooks make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_sm._lightning import LightningDataModule, LightningModule

STAGES = ("train", "val", "test", "predict")


class BareLoaders(LightningDataModule):
    """The DataModule of loaders that a script has made.

    Args:
        loaders: The loaders by stage: "train", "val", "test" or "predict".
    """

    def __init__(self, loaders: Mapping[str, Any]) -> None:
        super().__init__()
        for stage, own in loaders.items():
            setattr(self, f"{stage}_dataloader", _Hook(own))


class ModelLoaders(BareLoaders):
    """The DataModule of loaders that the hooks of a LightningModule make, here: their data hosts do not have the model.

    Args:
        model: The LightningModule.
        stages: The stages whose hooks it has.
    """

    def __init__(self, model: LightningModule, stages: tuple[str, ...]) -> None:
        super().__init__(dict.fromkeys(stages))
        self._model = model

    def make(self, stage: str) -> None:
        """Call the model's hook of a stage."""
        name = f"{stage}_dataloader"
        setattr(self, name, _Hook(getattr(self._model, name)()))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model out."""
        return {name: value for name, value in vars(self).items() if name != "_model"}


class _Hook:
    """A ``*_dataloader`` hook that returns given loaders."""

    def __init__(self, loaders: Any) -> None:
        self.loaders = loaders

    def __call__(self) -> Any:
        return self.loaders


def bare_loaders(model: Any, given: Mapping[str, Any]) -> LightningDataModule | None:
    """Return the DataModule of loaders that a method of the Trainer got, or else of the model's own hooks.

    Args:
        model: The LightningModule.
        given: The loaders that were handed over, by stage.

    Returns:
        None if there are neither.
    """
    if given:
        return BareLoaders(given)
    stages = tuple(
        stage for stage in STAGES if _is_own(model, f"{stage}_dataloader") and isinstance(model, LightningModule)
    )
    return ModelLoaders(model, stages) if stages else None


def _is_own(model: Any, hook: str) -> bool:
    return getattr(type(model), hook, None) is not getattr(LightningModule, hook) or hook in vars(model)
