"""A recorded batch, built by the code of a data host, from the DataModule of the script that runs in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from msgspec.structs import replace

from lightning_sm._lightning import LightningDataModule
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.feeder.host_link import HostLink, LinkState
from lightning_sm.data.feeder.sampler_orders import SamplerOrderClient, length_of
from lightning_sm.data.host.datamodule import ServedModule
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.sampler_process import write_order
from lightning_sm.data.host.worker import build_range
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.ipc.host_messages import Build, BuiltRange, SamplerOutput
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.calls import ListRequest, LoaderPass, Loaders, OpenRequest, Problem, put_together
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.spec import LoaderDescription, LoaderKind, StepRangeSpec
from lightning_sm.data.server.sampler_orders import SamplerOrderCache
from lightning_sm.data.trainer.bare_loaders import BareLoaders, bare_loaders
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.data.trainer.travel import TravellingModule
from lightning_sm.errors import OutputDirectoryError, RemoteTransformError, ReplayError
from lightning_sm.rebuild.messages import RebuiltBatch
from lightning_sm.rebuild.recorded_step import RecordedBatch
from lightning_sm.rebuild.samples import pass_request, spec_of
from lightning_sm.record.events import TrainingPass

# Any batch fits: a slot takes memory only as far as it is written.
_SLOT_BYTES = 1 << 34
_HERE = "this machine"
_RUN = 1


class ServedScript:
    """The script's DataModule, as a data host has it: its hooks have run for the passes of a step.

    Args:
        datamodule: The DataModule that the script gave to ``fit``.
        begun: A pass of the step; all its passes were opened alike.

    Attributes:
        structure: What ``train_dataloader()`` returned, see ``describe_structure``.

    Raises:
        DataServiceError: A hook failed, or the DataModule cannot be pickled.
    """

    def __init__(self, datamodule: LightningDataModule, begun: TrainingPass) -> None:
        self._module = ServedModule()
        if isinstance(datamodule, BareLoaders):
            datamodule.make("train")
        travelling = TravellingModule.of(datamodule)
        snapshot = travelling.pickled(by_name=True)
        self._module.keep(snapshot.digest, snapshot.write(), [])
        before_training = {"current_epoch": 0, "global_step": 0}
        request = OpenRequest(
            opening="",
            trainer_run=_RUN,
            stage="fit",
            loaders="",
            epoch=0,
            seed=begun.hook_seed,
            prepares=True,
            trainer={**begun.trainer, **before_training},
            datamodule=snapshot.digest,
            values=travelling.values(),
        )
        self._open(replace(request, opening=f"{_RUN}/fit//0"))
        self._opening = f"{_RUN}/fit/train/{begun.opened_epoch}"
        loaders: LoaderKind = "train"
        opened = self._open(
            replace(
                request,
                opening=self._opening,
                loaders=loaders,
                epoch=begun.opened_epoch,
                trainer=dict(begun.trainer),
            )
        )
        self.structure = cast("Loaders", opened).structure
        # What a worker does first.
        torch.set_num_threads(1)
        for loader in self._loaders:
            loader.enter_worker("replay", 0, 1)
        self._ring = Ring.create(1, _SLOT_BYTES)
        self._notes = WorkerNotes()

    def _open(self, request: OpenRequest) -> Any:
        reply = self._module.open(request)
        if isinstance(reply, Problem):
            raise reply.exception(_HERE)
        return reply

    def close(self) -> None:
        """Run ``teardown``."""
        self._module.leave()

    @property
    def _loaders(self) -> Sequence[ServedLoader]:
        return self._module.loaders[self._opening]

    def build(self, batch: RecordedBatch) -> tuple[Any, RebuiltBatch]:
        """Return a batch as the training process got it, and what was found out about it.

        Raises:
            ReplayError: The script's loader is another one than that of the record.
            DataServiceError: The script's code failed.
        """
        begun = batch.begun
        if begun.index >= len(self._loaders):
            raise ReplayError(
                f"train_dataloader() of the script returns {len(self._loaders)} loaders, but the record has a batch of "
                f"{begun.loader}, the one at position {begun.index}."
            )
        loader = self._loaders[begun.index]
        description = _as_recorded(loader.description, begun)
        request = pass_request(begun, description, self._opening)
        orders = _sampler_orders(loader)
        try:
            spec = spec_of(batch, request, orders)
            if begun.digest and (digest := length_of(request, orders).digest) != begun.digest:
                raise ReplayError(
                    f"The sampler of {begun.loader} yields another order here (digest {digest}) than in the run "
                    f"({begun.digest}): its data, its code or its arguments are others."
                )
        finally:
            orders.close()
        encoded_spec = StepRangeSpec(self._opening, begun.index, (spec,)).encode()
        outcome, built = build_range(Build(0, encoded_spec), self._ring, self._module.loaders, self._notes, 0)
        if isinstance(outcome, Failure):
            place = ", ".join(filter(None, (_HERE, outcome.where)))
            raise RemoteTransformError(outcome.at(place))
        if not isinstance(outcome, BuiltRange):
            raise ReplayError(
                f"{begun.loader}: the shard of the recorded batch has only {outcome.num_batches} batches here: the "
                "dataset yields fewer samples."
            )
        (one,) = built
        data = self._ring.slot(0)[one.start : one.start + one.num_bytes].copy()
        notes = []
        if description.identity != begun.data:
            notes.append(
                f"{begun.loader}: the dataset here ({description.dataset}, identity {description.identity}) is another "
                f"one than in the run ({begun.dataset}, identity {begun.data})."
            )
        if begun.has_state:
            notes.append(
                "The DataModule had loaded a state from a checkpoint (load_state_dict), which the record does not have."
            )
        indices = [] if batch.shard is not None else spec.keys.tolist()
        return decode(one.structure, data), RebuiltBatch(one.content_hash, indices, spec.position, notes)


def _as_recorded(loader: LoaderDescription, begun: TrainingPass) -> LoaderDescription:
    """Return the description of a loader, after checking that its order is made like the one in the record.

    Raises:
        ReplayError: It is not.
    """
    if begun.order == "sequential" and loader.order in ("shuffled", "sampler") and loader.dataset_length is not None:
        # Trainer(overfit_batches=...) reads the dataset in its order.
        loader = replace(loader, order="sequential", num_samples=loader.dataset_length)
    own = loader.order, loader.num_samples, loader.batch_size, loader.drop_last
    recorded = begun.order, begun.num_samples, begun.batch_size, begun.drop_last
    names = ("order", "samples", "batch size", "drop_last")
    different = [
        f"{name} {one!r} here, {other!r} in the run"
        for name, one, other in zip(names, own, recorded, strict=True)
        if one != other
    ]
    if different:
        raise ReplayError(
            f"{begun.loader} of the script is not the loader of the run: {'; '.join(different)}. Run the same script "
            "with the same arguments, on the same data: lightning-sm replay RUN --step N -- train.py --batch_size=32."
        )
    return loader


class _LocalLink:
    """A loader of this process, as the client for orders of samplers sees a data host."""

    name = _HERE
    state = LinkState.UP

    def __init__(self, loader: ServedLoader) -> None:
        self._loader = loader
        self._cache = SamplerOrderCache(self._run)

    def _run(self, loader_pass: LoaderPass, timeout_s: float) -> None:
        fd = os.memfd_create("lightning_sm_sampler_order", os.MFD_CLOEXEC)
        self._loader.advance_sampler(loader_pass)
        outcome = write_order(fd, self._loader, loader_pass)
        self._cache.take(SamplerOutput(loader_pass, outcome, (fd,)))

    def sampler_order(self, request: ListRequest) -> bytes:
        """Return what a data host answers to a ``ListRequest``."""
        return b"".join(self._cache.answer(request, request.timeout_s))


def _sampler_orders(loader: ServedLoader) -> SamplerOrderClient:
    links: dict[str, HostLink] = {_HERE: cast("HostLink", _LocalLink(loader))}
    return SamplerOrderClient(links, _raise)


def _raise(error: Exception) -> None:
    raise error


def handed_over(trainer: Any, given: Mapping[str, Any]) -> LightningDataModule:
    """Return the DataModule of a ``fit``, or that of its bare loaders or of the model's hooks.

    Args:
        trainer: The Trainer.
        given: The arguments that the script gave, by name.

    Raises:
        ReplayError: The script gave neither.
    """
    datamodule, loaders = given.get("datamodule"), given.get("train_dataloaders")
    if isinstance(loaders, LightningDataModule):
        datamodule = loaders
    if isinstance(datamodule, RemoteDataModule):
        datamodule = datamodule._datamodule
    model = given["model"]
    if datamodule is None:
        datamodule = bare_loaders(model, {} if loaders is None else {"train": loaders})
    if datamodule is None:
        raise ReplayError("fit() gets neither a DataModule nor loaders from the script, and the model has no hook.")
    trainer.strategy.connect(model)
    model.trainer = datamodule.trainer = trainer
    return datamodule


def assemble(structure: Any, batches: Mapping[int, Any]) -> Any:
    """Return the Trainer's batch: what ``training_step`` gets.

    Args:
        structure: What ``train_dataloader()`` returned.
        batches: The batches by the position of the loader; one without has ended.
    """
    return put_together(structure, batches.get, lambda part, _: part)


def save(contents: Sequence[Any], answers: Sequence[Sequence[RebuiltBatch]], output: Path) -> None:
    """Write the Trainer's batches of a step, and the indices of their samples.

    Raises:
        OutputDirectoryError: The file cannot be written.
    """
    indices = [[answer.indices for answer in of_batch] for of_batch in answers]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"batches": list(contents), "indices": indices}, output)
    except OSError as error:
        raise OutputDirectoryError(f"{output} cannot be written: {error.strerror or error}.") from error
