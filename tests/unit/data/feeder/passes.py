"""Passes as the training process asks the feeder for them."""

from lightning_sm.data.feeder.pass_buffer import InFlightRange
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, Position, StartPass
from lightning_sm.data.protocol.spec import LoaderDescription


def start_pass(
    pass_id=1,
    request_name="o",
    index=0,
    *,
    position=None,
    order="sequential",
    has_indices=True,
    tells_keys=False,
    **place,
):
    """A request for the batches of a pass; further arguments are those of its ``LoaderPlace``."""
    limits = {"window_batches": 8, "window_bytes": 5000, "max_batch_bytes": 4096, "timeout_s": 60.0}
    options = {"rank": 0, "world_size": 1, "seed": 1, **limits, **place}
    loader = LoaderDescription("train_dataloader()", order, None, 2, False, "i", "f", "Fake", has_indices=has_indices)
    return StartPass(
        pass_id,
        LoaderPlace(request_name, index, "train", **options),
        loader,
        Position() if position is None else position,
        ring=1,
        tells_keys=tells_keys,
    )


def in_flight(buffer, step_range, header, transfer_s=0.0):
    """The answer to the request for some steps of a pass, in slot 0."""
    memory = buffer.ring.slot(0)
    return InFlightRange(memory, "", header, step_range=step_range, slot=0, transfer_s=transfer_s)
