"""The rivals of rivals.py that need PyTorch: its DataLoader, lightning_sm, and the seed's protocol."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from rivals import BATCH_SIZE, NUM_WORKERS, SHAPE, Batch, Epoch, children, end_with_parent, made
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[tuple[int, int, np.ndarray]]):
    """The samples, each with its index and the process that made it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, np.ndarray]:
        """Return a sample."""
        sample, pid = made(index)
        return index, pid, sample


def arrays(batches: Iterable[list[torch.Tensor]]) -> Iterator[Batch]:
    """View tensors as arrays."""
    for indices, pids, samples in batches:
        yield indices.numpy(), pids.numpy(), samples.numpy()


@contextlib.contextmanager
def local(num_samples: int, method: str = "fork") -> Iterator[Epoch]:
    """Run a DataLoader in this process; ``method`` is how its workers are started."""
    loader = DataLoader(
        Samples(num_samples), batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, multiprocessing_context=method
    )
    yield lambda: arrays(loader)


@contextlib.contextmanager
def one_host(num_samples: int) -> Iterator[Epoch]:
    """Run a data host."""
    with _data_hosts(num_samples, [NUM_WORKERS]) as epoch:
        yield epoch


@contextlib.contextmanager
def two_hosts(num_samples: int) -> Iterator[Epoch]:
    """Run two data hosts, with as many workers in all."""
    with _data_hosts(num_samples, [NUM_WORKERS - 1, 1]) as epoch:
        yield epoch


@contextlib.contextmanager
def _data_hosts(num_samples: int, workers: list[int]) -> Iterator[Epoch]:
    from pytorch_lightning import LightningDataModule

    from lightning_sm.data.host.data_host import DataHost
    from lightning_sm.data.trainer.datamodule import RemoteDataModule

    class SamplesData(LightningDataModule):
        def train_dataloader(self) -> DataLoader[tuple[int, int, np.ndarray]]:
            return DataLoader(Samples(num_samples), batch_size=BATCH_SIZE)

    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        starters = stack.enter_context(ThreadPoolExecutor(len(workers)))  # at a time, as in a cluster
        hosts = [DataHost(SamplesData(), workers=count) for count in workers]
        hosts = list(starters.map(stack.enter_context, hosts))
        remote = RemoteDataModule(SamplesData(), [host.address for host in hosts], seed=0)
        remote.setup("fit")
        try:
            loader = remote.train_dataloader()
            yield lambda: arrays(loader)
        finally:
            remote.teardown("fit")


@contextlib.contextmanager
def seed(num_samples: int, method: str = "fork") -> Iterator[Epoch]:
    """Run a server that streams the batches of a DataLoader, and receive them as the AWS sample does."""
    import grpc
    from wire_baselines import LOOPBACK, METHOD, SERVICE, example_class

    options = [("grpc.max_receive_message_length", 200 * 1024 * 1024)]
    with contextlib.ExitStack() as stack:
        [port] = stack.enter_context(children([[sys.executable, __file__, str(num_samples), method]]))
        channel = stack.enter_context(grpc.insecure_channel(f"{LOOPBACK}:{port}", options=options))
        feed = channel.unary_stream(f"/{SERVICE}/{METHOD}", response_deserializer=example_class().FromString)

        def epoch() -> Iterator[Batch]:
            for message in feed(b"", wait_for_ready=True):
                image = torch.tensor(np.frombuffer(message.image, np.float32)).reshape(-1, *SHAPE)
                indices, pids = torch.tensor(np.frombuffer(message.label, np.int64)).reshape(2, -1)
                yield indices.numpy(), pids.numpy(), image.numpy()

        yield epoch


def seed_forkserver(num_samples: int) -> AbstractContextManager[Epoch]:
    """Run such a server that does not fork."""
    return seed(num_samples, "forkserver")


def serve_seed(num_samples: int, method: str) -> None:
    """Stream an epoch to each caller."""
    import grpc
    from wire_baselines import LOOPBACK, METHOD, SERVICE, example_class

    end_with_parent()
    example = example_class()

    def get_examples(_request: bytes, _context: Any) -> Iterator[Any]:
        with local(num_samples, method) as epoch:
            for indices, pids, samples in epoch():
                yield example(image=samples.tobytes(), label=np.stack([indices, pids]).tobytes())

    handler = grpc.unary_stream_rpc_method_handler(get_examples, response_serializer=example.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    os.write(1, b"%d\n" % port)
    server.wait_for_termination()


if __name__ == "__main__":
    serve_seed(int(sys.argv[1]), sys.argv[2])
