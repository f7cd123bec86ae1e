"""The last step of a pass, in which ranks may have different numbers of samples: what scripts notice of it."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from types import FrameType
from typing import Any

import torch

from lightning_sm._lightning import ResultMetric
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, TailMode
from lightning_sm.data.plan.samples import Tail
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.data.settings import TailSetting
from lightning_sm.data.trainer.logged_values import ExactResultMetric
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# Older versions of torch lack the last one, which replaces the one before it.
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single")
# Their own gathers are of equal sizes, or exchange the sizes before. LightningModule.all_gather calls the function of
# torch.distributed.nn.functional.
_LIBRARIES = frozenset(
    {"torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_sm", "deepspeed"}
)
_GATHER_OF_USER = "torch.distributed.nn.functional"

_CHECKPOINT_KEY = "lightning_sm.last_step"


class LastStep(UnlistedCallback):
    """The callback for a last step in which ranks have different numbers of samples.

    It lets logged values count each sample once. If the code of a stage gathers tensors over the ranks, which then must
    have the same size, it has the last step padded. All ranks run the same code, so each decides the same by itself:
    from what the stage has gathered in the steps before the last one.

    Args:
        setting: ``DataServiceSettings.tail``.
    """

    def __init__(self, setting: TailSetting) -> None:
        self._setting = setting
        self._trainer: Any = None
        self._undo = ExitStack()
        # Stages of this run of the Trainer: those that have begun a step, those whose code gathers, and those whose
        # epoch has had an uneven step.
        self._begun: set[str] = set()
        self._gathering: set[str] = set()
        self._uneven: set[str] = set()
        self._weights: list[float] = []  # of the batches that were taken since the last step began
        self._told: set[str] = set()

    def __reduce__(self) -> Any:
        """Leave out what belongs to a run in this process: strategies that spawn pickle the Trainer."""
        return LastStep, (self._setting,)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin a run of the Trainer, unless its loaders are those of another DataModule by now."""
        hosts = getattr(trainer.datamodule, "_hosts", None)
        if getattr(hosts, "last_step", None) is not self:
            return
        self._trainer = trainer
        for of_run in (self._begun, self._gathering, self._uneven):
            of_run.clear()
        self._weights = []
        if trainer.world_size > 1:
            self._replace(sys.modules[ResultMetric.__module__], "_ResultMetric", ExactResultMetric)
            for name in filter(partial(hasattr, torch.distributed), _GATHERS):
                self._replace(torch.distributed, name, self._watched(getattr(torch.distributed, name)))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run."""
        self._trainer = None
        self._undo.close()
        ExactResultMetric.weight = 1.0

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run: after an exception Lightning does not call ``teardown``."""
        self.teardown(trainer, pl_module, "")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save whether the training gathers: a run that resumes at the last step of an epoch has not seen it yet."""
        if self._trainer is trainer and "train" in self._begun:
            checkpoint[_CHECKPOINT_KEY] = {"train_gathers": "train" in self._gathering}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore whether the training gathers."""
        saved = checkpoint.get(_CHECKPOINT_KEY)
        if self._trainer is trainer and saved is not None:
            self._begun.add("train")
            if saved["train_gathers"]:
                self._gathering.add("train")

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Weigh what is logged from here on as the batches that this step has taken."""
        weights, self._weights = self._weights, []
        if weights:
            # Of several loaders in one step, each with its own number of samples, all must be at their end.
            ExactResultMetric.weight = weights[0] if all(weight != 1.0 for weight in weights) else 1.0
            self._begun.add(self._stage)

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        """Begin an epoch of a stage."""
        self._uneven.discard(self._stage)
        self.on_train_epoch_end()

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Weigh all ranks alike: what is logged now belongs to no batch."""
        ExactResultMetric.weight = 1.0

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start
    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = on_train_epoch_start
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end

    def take(self, weight: float, *, is_manual: bool) -> None:
        """Note the weight of a batch that a loader returns, to the Trainer or to the user."""
        if weight != 1.0:
            self._uneven.add(self._stage)
        if not is_manual:
            self._weights.append(weight)

    def mode(self, description: LoaderDescription, place: LoaderPlace, *, is_manual: bool) -> TailMode:
        """Return what to do with the last step of a pass that starts.

        Args:
            description: The loader.
            place: Where it belongs.
            is_manual: Whether the user iterates over it, and not the Trainer.
        """
        if place.world_size == 1:
            return "exact"
        if self._setting != "auto":
            return self._setting
        stage = self._stage or place.stage
        if stage in self._gathering:
            self._tell(description, place, "the code of this stage gathers tensors over the ranks (all_gather)")
            return "pad"
        return "hold" if is_manual or stage not in self._begun else "exact"

    def mode_of_held(self, description: LoaderDescription, place: LoaderPlace) -> TailMode:
        """Return what to do with a last step that was held back, now that all steps before it are complete.

        If it is the first step of its stage, nothing is known: it is padded, because a gather would fail otherwise.
        """
        stage = self._stage or place.stage
        if stage in self._gathering:
            return self.mode(description, place, is_manual=False)
        if stage in self._begun:
            return "exact"
        self._tell(
            description, place, "it is the first step of this stage, whose code may gather tensors over the ranks"
        )
        return "pad"

    @property
    def _stage(self) -> str:
        """The stage whose code runs, as in the names of its loaders; empty: none."""
        stage = None if self._trainer is None else self._trainer.state.stage
        return "" if stage is None else str(stage.dataloader_prefix)

    def _tell(self, description: LoaderDescription, place: LoaderPlace, why: str) -> None:
        if place.rank or description.name in self._told or not _may_be_uneven(description, place):
            return
        self._told.add(description.name)
        logger.info(
            "%s: in the last step, samples repeat so that all %d ranks have equally many, as with torch's "
            "DistributedSampler, because %s (data_service.tail=auto).",
            description.name,
            place.world_size,
            why,
        )

    def _replace(self, module: Any, name: str, replacement: Any) -> None:
        self._undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, replacement)

    def _watched(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(gather)

        @wraps(gather)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and _is_of_user(sys._getframe(1)):
                arguments = signature.bind(*args, **kwargs).arguments
                _, tensor, *_ = arguments.values()
                self._note_gather(tensor, arguments.get("group"))
            return gather(*args, **kwargs)

        return call

    def _note_gather(self, tensor: torch.Tensor, group: Any) -> None:
        num_ranks = torch.distributed.get_world_size(group)
        if not tensor.ndim or num_ranks < 1 or not self._stage:  # one value of each rank, or a group without this rank
            return
        # Ranks outside of a smaller group do not notice its gather, and would not pad.
        if num_ranks == torch.distributed.get_world_size():
            self._gathering.add(self._stage)
        if self._stage in self._uneven:
            self._check_shapes(tuple(tensor.shape), num_ranks, group)

    def _check_shapes(self, shape: tuple[int, ...], num_ranks: int, group: Any) -> None:
        """Compare the shapes of all ranks before a gather: if they differ, Gloo aborts, and NCCL does anything."""
        shapes: list[Any] = [None] * num_ranks
        torch.distributed.all_gather_object(shapes, shape, group)
        other = next((rank for rank, one in enumerate(shapes) if one != shapes[0]), None)
        if other is not None:
            raise DataSettingsError(
                f"all_gather got tensors of different shapes: {shapes[0]} from rank 0 of its group, but "
                f"{shapes[other]} from rank {other}. In the last step, the ranks had different numbers of samples "
                f"(data_service.tail={self._setting}). Set data_service.tail=pad: samples then repeat there, as with "
                "torch's DistributedSampler, so that all ranks have equally many."
            )


def _may_be_uneven(description: LoaderDescription, place: LoaderPlace) -> bool:
    if description.order not in ("sequential", "shuffled", "sampler"):
        return False
    if description.num_samples is None:
        return True
    return Tail.of(
        description.num_samples,
        description.batch_size,
        drop_last=description.drop_last,
        rank=place.rank,
        world_size=place.world_size,
    ).is_uneven


def _is_of_user(caller: FrameType) -> bool:
    name = str(caller.f_globals.get("__name__", ""))
    return name == _GATHER_OF_USER or name.partition(".")[0] not in _LIBRARIES
