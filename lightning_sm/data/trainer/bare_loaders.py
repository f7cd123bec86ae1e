"""Loaders without a DataModule: those handed to ``fit``, and those that the LightningModule's own hooks make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_sm._lightning import LightningDataModule
from lightning_sm._unlisted import UnlistedDataModule

STAGES = ("train", "val", "test", "predict")


class BareLoaders(UnlistedDataModule):
    """The DataModule of a script without one. As in Lightning, the model's hooks make what the script has not made.

    The hooks run here: data hosts do not have the model. It is that of the Trainer.

    Args:
        given: The loaders that the script has made, by stage: "train", "val", "test" or "predict".
        model: The model.
    """

    def __init__(self, given: Mapping[str, Any], model: Any) -> None:
        super().__init__()
        self._stages_of_model = [
            stage for stage in STAGES if stage not in given and has_hook(model, f"{stage}_dataloader")
        ]
        for stage in (*given, *self._stages_of_model):
            setattr(self, f"{stage}_dataloader", _Hook(given.get(stage)))

    def make(self, stage: str) -> None:
        """Call the model's hook of a stage, unless the script has made the loaders."""
        if stage in self._stages_of_model:
            name = f"{stage}_dataloader"
            setattr(self, name, _Hook(getattr(self.trainer.lightning_module, name)()))  # type: ignore[union-attr]


class _Hook:
    """A ``*_dataloader`` hook that returns given loaders."""

    def __init__(self, loaders: Any) -> None:
        self.loaders = loaders

    def __call__(self) -> Any:
        return self.loaders


def bare_loaders(model: Any, given: Mapping[str, Any]) -> LightningDataModule | None:
    """Return the DataModule of loaders that a method of the Trainer got, and of those of the model's own hooks.

    Args:
        model: The LightningModule.
        given: The loaders that were handed over, by stage.

    Returns:
        None if there are neither.
    """
    return (
        BareLoaders(given, model) if given or any(has_hook(model, f"{stage}_dataloader") for stage in STAGES) else None
    )


def has_hook(owner: Any, name: str) -> bool:
    """Return whether a LightningModule or a DataModule, or its class, has a ``*_dataloader`` hook of its own.

    Args:
        owner: The object.
        name: Name of the hook.
    """
    hook = getattr(owner, name, None)  # None: a script has switched it off
    return callable(hook) and getattr(hook, "__func__", hook) is not getattr(LightningDataModule, name)
