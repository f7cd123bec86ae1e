"""The samples of a recorded step, as far as the record alone tells: without data, script and torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, cast

import numpy as np

from lightning_sm.data.feeder.pass_buffer import spec_at
from lightning_sm.data.feeder.sampler_orders import SamplerOrderClient, plan_pass
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, PassRequest, Position
from lightning_sm.data.plan.replacement import with_replacements
from lightning_sm.data.protocol.spec import BatchSpec, LoaderDescription, OrderKind
from lightning_sm.errors import ReplayError
from lightning_sm.rebuild.recorded_step import RecordedBatch, RecordedStep
from lightning_sm.record.events import TrainingPass, to_json

# A sampler may take as long as for a job.
_SAMPLER_TIMEOUT_S = 900.0
# The import of torch on a busy machine, and the permutation of a billion samples.
_ORDER_TIMEOUT_S = 600.0


def spec_of(batch: RecordedBatch, request: PassRequest, sampler_orders: SamplerOrderClient) -> BatchSpec:
    """Return everything that the content of a batch depends on: what a data host was sent.

    Args:
        batch: The batch.
        request: Its pass.
        sampler_orders: Source of the orders of the user's samplers.

    Raises:
        ReplayError: The pass has no such batch.
        DataServiceError: The sampler failed.
    """
    begun = batch.begun
    pass_index = begun.pass_index if batch.shard is None else batch.shard_pass
    base = BatchSpec(begun.seed, begun.epoch, pass_index, 0, 0, np.empty(0, np.int64))
    if batch.shard is not None:
        return base._replace(keys=np.array([begun.num_shards, *batch.shard, True], np.int64))
    plan, _ = plan_pass(request, sampler_orders)
    try:
        spec = spec_at(plan, base, batch.number)
    except IndexError as error:
        raise ReplayError(
            f"{begun.loader}: the record has batch {batch.number} of a pass, but here it has {plan.num_steps}: the "
            "dataset or the sampler has another length."
        ) from error
    return spec._replace(keys=with_replacements(spec.keys, batch.replacements))


def pass_request(begun: TrainingPass, loader: LoaderDescription, request_name: str = "") -> PassRequest:
    """Return the request with which a rank began a pass.

    Args:
        begun: The pass.
        loader: Description of its loader.
        request_name: Name of the request that opened the loader.
    """
    place = LoaderPlace(
        request_name=request_name,
        index=begun.index,
        stage="train",
        rank=begun.rank,
        world_size=begun.world_size,
        seed=begun.seed,
        window_batches=1,
        window_bytes=1,
        max_batch_bytes=1,
        timeout_s=_SAMPLER_TIMEOUT_S,
        num_shards=begun.num_shards or 1,
    )
    position = Position(
        epoch=begun.epoch,
        pass_index=begun.pass_index,
        first_step=begun.first_step,
        stop_step=begun.stop_step,
        tail="pad" if begun.tail == "pad" else "exact",
        earlier_stop_step=begun.earlier_stop_step,
    )
    return PassRequest(0, place, loader, position)


def recorded_loader(begun: TrainingPass) -> LoaderDescription:
    """Return the description of a pass's loader, as far as the record has it."""
    return LoaderDescription(
        name=begun.loader,
        order=cast("OrderKind", begun.order),
        num_samples=begun.num_samples,
        batch_size=begun.batch_size,
        drop_last=begun.drop_last,
        identity=begun.data,
        fingerprint="",
        dataset=begun.dataset,
    )


def local_samples(step: RecordedStep) -> list[list[dict[str, Any]]]:
    """Return which samples a rank read without data hosts, for each batch of the Trainer, as JSON values.

    Raises:
        ReplayError: A sampler other than torch's own sequential or distributed one made the order, or the record does
            not say which.
    """
    unknown = [begun for begun in step.local if not begun.is_known]
    if unknown or not step.local:
        which = f"the order of a {unknown[0].sampler}, which no seed in the record tells" if unknown else "no loader"
        raise ReplayError(
            f"The record does not say which samples this step had: no data hosts served the run, and it has {which}. "
            "Known are the orders of a DataLoader without shuffle, and of DistributedSampler, which Lightning uses on "
            "several ranks. See docs/replay.md."
        )
    asked = [[to_json(begun), number] for number in step.numbers for begun in step.local]
    own = [sys.executable, "-m", "lightning_sm.rebuild.local_order"]
    try:
        ended = subprocess.run(
            own, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=_ORDER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ReplayError(f"The order of the samples was not computed within {_ORDER_TIMEOUT_S:.0f} s.") from error
    except subprocess.CalledProcessError as error:
        raise ReplayError(f"The process that computes the order of the samples failed:\n{error.stderr}") from error
    found = iter(json.loads(ended.stdout))
    batches = []
    for number in step.numbers:
        of_loaders = []
        for begun in step.local:
            indices = next(found)
            if indices is not None:  # a CombinedLoader goes on without it
                position = number * begun.batch_size
                of_loaders.append(
                    {"loader": f"training loader {begun.index}", "position": position, "indices": indices}
                )
        batches.append(of_loaders)
    return batches


def samples_of(batch: RecordedBatch) -> dict[str, Any]:
    """Return which samples a batch has, as JSON values.

    Raises:
        ReplayError: The order is that of a sampler of the user's, which the record does not have.
    """
    begun = batch.begun
    if batch.shard is not None:
        shard, offset = batch.shard
        return {"loader": begun.loader, "shard": shard, "of": begun.num_shards, "batch_of_shard": offset}
    if begun.order not in ("sequential", "shuffled"):
        raise ReplayError(
            f"{begun.loader} is read in the order of a sampler of the script, of which the record has only the digest "
            f"({begun.digest}). Leave out --samples: then the script's own sampler yields it."
        )
    nobody = cast("SamplerOrderClient", None)  # asked for the orders of samplers only
    spec = spec_of(batch, pass_request(begun, recorded_loader(begun)), nobody)
    return {"loader": begun.loader, "position": spec.position, "indices": spec.keys.tolist()}
