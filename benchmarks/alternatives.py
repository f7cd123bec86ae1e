"""Compare ways to load data on another host's CPUs (lightning_sm, the AWS sample, Ray Data) and a local DataLoader.

    ready    Batches of 64 images of 3x224x224 bytes are in memory. One worker sends them; the trainer discards them.
    slow     A sample takes 6 ms, a batch has 16 samples, and a step takes 15 ms, as in the AWS sample's experiment. The
             data host has eight workers; without a data host, the trainer has one.

Transforms and steps sleep. Data host and trainer run on separate cores and talk over loopback. In the AWS sample
(amazon-sagemaker-examples, pt.grpc.sagemaker), a DataLoader fills a queue with bytes, a gRPC server streams them, and a
DataLoader worker on the trainer turns them into tensors. Ray Data runs actors on a second node of a Ray cluster, and
``iter_torch_batches`` on the first.

    pip install -e . 'ray[data]' protobuf
    python benchmarks/alternatives.py --rounds 3
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from data_service import in_child, in_turn, machine, parser, pinned, prepare, ratio, service, sleep_s, spread
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset
from wire_baselines import METHOD, SERVICE, example_class

from lightning_sm._table import draw_table

SHAPE = (3, 224, 224)
NUM_SAMPLES = 1_000_000  # more than any run takes
# Batch size, seconds per sample, seconds per step, workers of the data host.
EXPERIMENTS = {"ready": (64, 0.0, 0.0, 1), "slow": (16, 0.006, 0.015, 8)}


class Images(Dataset[torch.Tensor]):
    """Images in memory, each of which takes a fixed time."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s
        self.images = torch.randint(0, 256, (64, *SHAPE), dtype=torch.uint8)

    def __len__(self) -> int:
        """Return the number of images."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sleep, then return an image."""
        if self.sample_s:
            sleep_s(self.sample_s)
        return self.images[index % len(self.images)]


class ImagesData(LightningDataModule):
    """A data module with a loader of these images."""

    def __init__(self, batch_size: int, sample_s: float, workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.sample_s, self.workers = batch_size, sample_s, workers

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the loader."""
        return DataLoader(Images(self.sample_s), self.batch_size, num_workers=self.workers)


def timed(batches: Iterable[Any], batch_size: int, step_s: float, num_batches: int) -> float:
    """Return the seconds per step, after an equally long warm-up: Ray builds several batches before it sends any."""
    iterator, began = iter(batches), 0.0
    for number in range(2 * num_batches):
        if number == num_batches:
            began = time.perf_counter()
        batch = next(iterator)
        if batch.shape != (batch_size, *SHAPE):
            raise ValueError(f"a batch has the shape {tuple(batch.shape)}; expected {(batch_size, *SHAPE)}")
        if step_s:
            sleep_s(step_s)
    return (time.perf_counter() - began) / num_batches


def local(experiment: str, num_batches: int, trainer_cores: list[int], **_: Any) -> float:
    """Measure a DataLoader with one worker on the trainer."""
    batch_size, sample_s, step_s, _ = EXPERIMENTS[experiment]
    prepare(trainer_cores)
    return timed(ImagesData(batch_size, sample_s, 1).train_dataloader(), batch_size, step_s, num_batches)


def lightning_sm(experiment: str, num_batches: int, host_cores: list[int], trainer_cores: list[int]) -> float:
    """Measure a data host of lightning_sm."""
    batch_size, sample_s, step_s, workers = EXPERIMENTS[experiment]
    with service(ImagesData(batch_size, sample_s), workers, host_cores, trainer_cores) as running:
        return timed(running.loader, batch_size, step_s, num_batches)


def aws_sample(experiment: str, num_batches: int, host_cores: list[int], trainer_cores: list[int]) -> float:
    """Measure a data host as in the AWS sample."""
    batch_size, _, step_s, _ = EXPERIMENTS[experiment]
    prepare(trainer_cores)
    with _sample_server(experiment, host_cores) as port:
        # The server sends complete batches. One worker is the sample's default.
        loader = DataLoader(_Received(port, batch_size), batch_size=None, num_workers=1)
        return timed(loader, batch_size, step_s, num_batches)


class _Received(IterableDataset[torch.Tensor]):
    """The batches of a server, decoded as in the AWS sample."""

    def __init__(self, port: int, batch_size: int) -> None:
        self.port, self.batch_size = port, batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the images of each message."""
        import grpc
        import numpy as np

        options = [("grpc.max_receive_message_length", 200 * 1024 * 1024)]  # the limit in the AWS sample
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            feed = channel.unary_stream(f"/{SERVICE}/{METHOD}", response_deserializer=example_class().FromString)
            for message in feed(b"", wait_for_ready=True):
                yield torch.tensor(np.frombuffer(message.image, np.uint8)).reshape(self.batch_size, *SHAPE)


@contextmanager
def _sample_server(experiment: str, cores: list[int]) -> Iterator[int]:
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    with pinned(cores):
        server = processes.Process(target=_serve_sample, args=(experiment, theirs))
        server.start()
    try:
        yield ours.recv()
    finally:
        ours.close()
        server.join()


def _serve_sample(experiment: str, connection: Any) -> None:
    """Stream batches until the other end of a connection is closed."""
    import grpc

    multiprocessing.set_start_method("fork", force=True)  # in a spawned process, the default would be spawn
    example = example_class()
    queue: Any = multiprocessing.Queue(32)
    filler = multiprocessing.Process(target=_fill, args=(experiment, queue))
    filler.start()

    def batches(_request: bytes, _context: Any) -> Iterator[Any]:
        while True:
            yield example(image=queue.get(), label=b"")

    handler = grpc.unary_stream_rpc_method_handler(batches, response_serializer=example.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    connection.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    connection.poll(None)
    filler.terminate()
    filler.join()
    server.stop(0)
    queue.cancel_join_thread()


def _fill(experiment: str, queue: Any) -> None:
    batch_size, sample_s, _, workers = EXPERIMENTS[experiment]
    for batch in ImagesData(batch_size, sample_s, workers).train_dataloader():
        queue.put(batch.numpy().tobytes())


class _Builder:
    """A Ray actor that builds batches."""

    def __init__(self, sample_s: float) -> None:
        self.dataset = Images(sample_s)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Build the batch with the given indices."""
        return {"image": torch.stack([self.dataset[int(index)] for index in rows["id"]]).numpy()}


def ray_data(experiment: str, num_batches: int, host_cores: list[int], trainer_cores: list[int]) -> float:
    """Measure a Ray cluster whose second node builds the batches."""
    import ray
    from ray.cluster_utils import Cluster

    batch_size, sample_s, step_s, workers = EXPERIMENTS[experiment]
    prepare(trainer_cores)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    with pinned(host_cores):
        cluster.add_node(num_cpus=workers + 1)  # one CPU for the tasks that number the samples
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        built = ray.data.range(NUM_SAMPLES).map_batches(
            _Builder, fn_constructor_args=(sample_s,), batch_size=batch_size, concurrency=workers, num_cpus=1
        )
        batches = iter(built.iter_torch_batches(batch_size=batch_size, prefetch_batches=4, drop_last=True))
        step_s = timed((batch["image"] for batch in batches), batch_size, step_s, num_batches)
        del batches  # stops the threads that fetch them
        return step_s
    finally:
        ray.shutdown()
        cluster.shutdown()


VARIANTS = {
    "DataLoader, 1 local worker": local,
    "lightning_sm": lightning_sm,
    "AWS sample": aws_sample,
    "Ray Data": ray_data,
}


def main() -> None:
    """Run the experiments and print a table."""
    options = parser("compare ways to load data on the CPUs of another host", rounds=3)
    options.add_argument("--batches", type=int, default=200, help="number of measured batches per run")
    options.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = options.parse_args()
    shared = {"num_batches": args.batches, "host_cores": args.host_cores, "trainer_cores": args.trainer_cores}
    rows = []
    for experiment in EXPERIMENTS:
        results = in_turn(
            {name: partial(in_child, VARIANTS[name], experiment=experiment, **shared) for name in args.variants},
            args.rounds,
        )
        first = results[args.variants[0]]
        rows += [
            [experiment, name, spread([1e3 * step_s for step_s in steps], 1), ratio(first, steps)]
            for name, steps in results.items()
        ]
    headers = ["experiment", "batches from", "ms per step", f"x {args.variants[0]}"]
    sys.stdout.write(machine() + draw_table(rows, headers) + "\n")


if __name__ == "__main__":
    main()
