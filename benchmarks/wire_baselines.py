"""Measure baselines for the data service's transport: raw TCP, gRPC alone, and the code of the AWS sample.

Each baseline has one server and one client process, on separate cores and over loopback, and sends the same batches:

    raw-tcp      Four outstanding requests on one TCP connection; the client receives into a preallocated ring.
    grpcio       The limit of gRPC for Python: one stream of raw bytes with the service's options and pieces, copied
                 into a ring. Batches are not requested, built or delivered.
    h2           The same server with the service's own client, which receives into the ring.
    seed-npsave  One gRPC stream of whole batches, as `np.save` output in protobuf messages; the client decodes them
                 with protobuf, `np.load` and `torch.tensor`.
    seed         The encoding of the AWS sample (amazon-sagemaker-examples, pt.grpc.sagemaker): `tobytes` on the server,
                 `np.frombuffer` and `torch.tensor` on the client. It is faster than `np.save`, so the comparison is
                 fairer.
    rpcdataloader
                 Version 0.2.1, whose dataset returns whole batches, in tensors that share its server's memory. (With
                 samples, it would send their collate function with each request.)

The batches exist in the server's memory, so only encoding, transport and decoding count.

    pip install -e . protobuf rpcdataloader
    python benchmarks/wire_baselines.py --payload a --seconds 3
    python benchmarks/wire_baselines.py --payload a c --rounds 5 --server-cores 0,1 --client-cores 2,3
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import mmap
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lightning_sm._table import draw_table

LOOPBACK = "127.0.0.1"
NUM_SOURCES = 4  # batches that the server sends in turn
NUM_SLOTS = 8  # batches in the client's ring
NUM_OUTSTANDING = 4  # requests that raw-tcp keeps in flight, as many as the service
WARM_UP_S = 0.4  # after the checked batches, until buffers, windows and page tables have grown to their final size
SERVICE, METHOD = "Feed", "get_examples"
Cores = Iterable[int]


@dataclass(frozen=True)
class Payload:
    """One kind of batch: a tensor of this shape and type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of one batch."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def batch(self, index: int) -> np.ndarray:
        """Return the batch with this index as bytes, which are the same in every process."""
        return np.frombuffer(np.random.default_rng(index % NUM_SOURCES).bytes(self.size_bytes), np.uint8)


PAYLOADS = {
    "a": Payload((256, 3, 224, 224), "uint8"),
    "c": Payload((8192, 1, 28, 28), "float32"),
    "d": Payload((1024, 32, 32, 3), "uint8"),
    "e": Payload((64, 128), "int64"),
}


@dataclass(frozen=True)
class Result:
    """Throughput of one run at the consuming process, and the CPU time (user and system) of each end."""

    num_batches: int
    seconds: float
    gb_per_s: float
    server_cpu_s_per_gb: float
    client_cpu_s_per_gb: float


def allocate(size_bytes: int, count: int) -> list[memoryview]:
    """Return slots in one anonymous shared mapping, with every page allocated."""
    stride = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    ring = memoryview(mmap.mmap(-1, stride * count, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    return [ring[start : start + size_bytes] for start in range(0, stride * count, stride)]


def sources(payload: Payload) -> list[memoryview]:
    """Return the server's batches in shared memory."""
    slots = allocate(payload.size_bytes, NUM_SOURCES)
    for index, slot in enumerate(slots):
        slot[:] = payload.batch(index).data
    return slots


def cpu_s(pids: Iterable[int]) -> float:
    """Return the user and system time that these processes have used."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def consume(
    batches: Iterator[Any],
    size_bytes: int,
    server_pids: Sequence[int],
    client_pids: Sequence[int] = (),
    *,
    seconds: float | None = None,
    num_batches: int | None = None,
) -> Result:
    """Warm up, then take batches until the time or the number is reached, and return the throughput.

    This function works with any transport. Call it in the consuming process, which counts as part of the client.
    """
    pids = (os.getpid(), *client_pids)
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        next(batches)
    server, client, start, taken, elapsed = cpu_s(server_pids), cpu_s(pids), time.perf_counter(), 0, 0.0
    while elapsed < (seconds or math.inf) and taken < (num_batches or math.inf):
        next(batches)
        taken += 1
        elapsed = time.perf_counter() - start
    gb = taken * size_bytes / 1e9
    return Result(taken, elapsed, gb / elapsed, (cpu_s(server_pids) - server) / gb, (cpu_s(pids) - client) / gb)


def serve_raw_tcp(payload: Payload) -> None:
    """Answer each byte with a batch."""
    slots = itertools.cycle(sources(payload))
    with socket.create_server((LOOPBACK, 0)) as listener:
        os.write(1, b"%d\n" % listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):  # the client disconnects in the middle of a batch
            while connection.recv(1):
                connection.sendall(next(slots))


def receive_raw_tcp(payload: Payload, port: int) -> Iterator[memoryview]:
    """Receive batches into a ring."""
    slots = allocate(payload.size_bytes, NUM_SLOTS)
    with socket.create_connection((LOOPBACK, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes(NUM_OUTSTANDING))
        for slot in itertools.cycle(slots):
            filled = 0
            while filled < len(slot):
                if not (received := connection.recv_into(slot[filled:])):
                    raise ConnectionError("the server closed the connection")
                filled += received
            connection.sendall(b"\0")
            yield slot


def serve_grpcio(payload: Payload) -> None:
    """Stream the bytes of batches until the client stops reading."""
    import grpc

    from lightning_sm.data.ipc.processes import keep_freed_memory
    from lightning_sm.data.protocol.call_metadata import SERVICE as DATA_SERVICE
    from lightning_sm.data.protocol.frames import FrameKind, frame
    from lightning_sm.data.protocol.grpc_transport import Guard, server_options
    from lightning_sm.data.protocol.spec import CHUNK_BYTES
    from lightning_sm.data.settings import Credentials

    class DataGuard(Guard):
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            is_ours = details.method.startswith(f"/{DATA_SERVICE}/")
            return super().intercept_service(continuation, details) if is_ours else continuation(details)

    keep_freed_memory()
    slots = sources(payload)

    def stream(_requests: Iterator[bytes], _context: Any) -> Iterator[bytes]:
        for slot in itertools.cycle(slots):
            for start in range(0, len(slot), CHUNK_BYTES):
                piece = slot[start : start + CHUNK_BYTES]
                yield b"".join([frame(0, FrameKind.DATA, len(piece), start), piece])

    handler = grpc.stream_stream_rpc_method_handler(stream)
    guard = DataGuard(Credentials("benchmark", ""), "")
    server = grpc.server(ThreadPoolExecutor(max_workers=1), interceptors=[guard], options=server_options())
    names = ((SERVICE, METHOD), (DATA_SERVICE, "Fetch"))
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(service, {method: handler}) for service, method in names)
    )
    os.write(1, b"%d\n" % server.add_insecure_port(f"{LOOPBACK}:0"))
    server.start()
    server.wait_for_termination()


class _Slots:
    """A ring that the connection's thread fills some slots ahead of the consumer."""

    def __init__(self, payload: Payload) -> None:
        self.full: queue.Queue[memoryview] = queue.Queue(NUM_SLOTS - 2)
        self.memory = memoryview(b"")
        self._slots = itertools.cycle(allocate(payload.size_bytes, NUM_SLOTS))
        self._slot = next(self._slots)
        self._num_left = len(self._slot)

    def take(self, _request: int, kind: int, _value: int, _payload: memoryview) -> None:
        """Reject frames other than pieces of batches."""
        raise ConnectionError(f"the server sent a frame of kind {kind}")

    def place(self, _request: int, _kind: int, offset: int, num_bytes: int) -> _Slots:
        """Return the memory for a piece."""
        self.memory = self._slot[offset : offset + num_bytes]
        return self

    def end(self, is_complete: bool) -> None:
        """Pass a slot to the consumer once it is full."""
        self._num_left -= len(self.memory) * is_complete
        if not self._num_left:
            self.full.put(self._slot)
            self._slot = next(self._slots)
            self._num_left = len(self._slot)


def receive_h2(payload: Payload, port: int) -> Iterator[memoryview]:
    """Receive the pieces into a ring."""
    from lightning_sm.data.ipc.processes import keep_freed_memory
    from lightning_sm.data.protocol.frames import FrameReader
    from lightning_sm.data.protocol.grpc_client import GrpcChannel
    from lightning_sm.data.settings import Credentials

    class Reader(FrameReader):
        def end(self, error: Exception | None) -> None:
            raise ConnectionError("the server closed the connection") from error

    keep_freed_memory()
    slots = _Slots(payload)
    GrpcChannel(f"{LOOPBACK}:{port}", Credentials("benchmark", "")).open("Fetch", Reader(slots.take, slots.place), None)
    while True:
        yield slots.full.get()


def receive_grpcio(payload: Payload, port: int) -> Iterator[memoryview]:
    """Copy the pieces into a ring."""
    import grpc

    from lightning_sm.data.ipc.processes import keep_freed_memory
    from lightning_sm.data.protocol.frames import FRAME_BYTES

    keep_freed_memory()
    slots = allocate(payload.size_bytes, NUM_SLOTS)
    # The fastest options found: large frames, and a fixed window for several pieces.
    options = {
        "grpc.max_receive_message_length": -1,
        "grpc.http2.lookahead_bytes": 16 << 20,
        "grpc.http2.max_frame_size": (1 << 24) - 1,
        "grpc.http2.bdp_probe": 0,
    }
    with grpc.insecure_channel(f"{LOOPBACK}:{port}", options=list(options.items())) as channel:
        # The stream of requests never ends, and no request is ever sent.
        messages = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(queue.SimpleQueue().get, 0), wait_for_ready=True)
        for slot in itertools.cycle(slots):
            filled = 0
            while filled < len(slot):
                piece = np.frombuffer(next(messages), np.uint8, offset=FRAME_BYTES)
                np.frombuffer(slot, np.uint8)[filled : filled + len(piece)] = piece
                filled += len(piece)
            yield slot


def example_class() -> Any:
    """Build the AWS sample's message, ``Example{bytes image = 1; bytes label = 2;}``, without generated code."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="feed.proto", package="wire_baselines", syntax="proto3")
    message = file.message_type.add(name="Example")
    message.field.add(name="image", number=1, type="TYPE_BYTES", label="LABEL_OPTIONAL")
    message.field.add(name="label", number=2, type="TYPE_BYTES", label="LABEL_OPTIONAL")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("wire_baselines.Example"))


def np_save(array: np.ndarray) -> bytes:
    """Encode an array in NumPy's file format."""
    np.save(buffer := io.BytesIO(), array)
    return buffer.getvalue()


def np_load(field: bytes, _dtype: str) -> np.ndarray:
    """Decode an array from NumPy's file format, which includes its type."""
    return np.load(io.BytesIO(field))


def serve_seed(payload: Payload, encode: Callable[[np.ndarray], bytes]) -> None:
    """Stream whole batches until the client stops reading."""
    import grpc

    example = example_class()
    batches = [np.frombuffer(slot, payload.dtype).reshape(payload.shape) for slot in sources(payload)]
    labels = np.zeros(payload.shape[0], np.int8)

    def get_examples(_request: bytes, _context: Any) -> Iterator[Any]:
        for batch in itertools.cycle(batches):
            yield example(image=encode(batch), label=encode(labels))

    handler = grpc.unary_stream_rpc_method_handler(get_examples, response_serializer=example.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    os.write(1, b"%d\n" % server.add_insecure_port(f"{LOOPBACK}:0"))
    server.start()
    server.wait_for_termination()


def receive_seed(payload: Payload, port: int, decode: Callable[[bytes, str], np.ndarray]) -> Iterator[memoryview]:
    """Decode each message into a pair of new tensors, and yield the memory of the first."""
    import grpc
    import torch

    options = [("grpc.max_receive_message_length", 200 * 1024 * 1024)]  # the limit in the AWS sample
    with grpc.insecure_channel(f"{LOOPBACK}:{port}", options=options) as channel:
        feed = channel.unary_stream(f"/{SERVICE}/{METHOD}", response_deserializer=example_class().FromString)
        for message in feed(b"", wait_for_ready=True):
            image = torch.tensor(decode(message.image, payload.dtype)).reshape(payload.shape)
            torch.tensor(decode(message.label, "int8")).type(torch.int64)
            yield image.numpy().data.cast("B")


class ReadyBatches:
    """A dataset of batches in memory, which rpcdataloader creates on its server."""

    def __init__(self, payload: Payload) -> None:
        import torch

        arrays = (np.frombuffer(slot, payload.dtype).reshape(payload.shape) for slot in sources(payload))
        self.batches = [torch.from_numpy(array) for array in arrays]

    def __len__(self) -> int:
        """Return the number of batches, more than any run takes."""
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        """Return a batch."""
        return self.batches[index % NUM_SOURCES]


def serve_rpcdataloader(_payload: Payload) -> None:
    """Answer requests, two at a time."""
    from rpcdataloader import rpc

    listen = rpc._create_server

    def listen_and_tell(*args: Any, **options: Any) -> socket.socket:
        listener = listen(*args, **options)
        os.write(1, b"%d\n" % listener.getsockname()[1])
        return listener

    rpc._create_server = listen_and_tell  # run_worker does not say which free port it found
    rpc.run_worker(LOOPBACK, 0, parallel=2)


def receive_rpcdataloader(payload: Payload, port: int) -> Iterator[memoryview]:
    """Yield the memory of each tensor."""
    from rpcdataloader import RPCDataloader, RPCDataset

    dataset = RPCDataset([f"{LOOPBACK}:{port}"], ReadyBatches, payload)
    for batch in RPCDataloader(dataset, batch_size=None, prefetch_factor=NUM_OUTSTANDING):
        yield batch.numpy().data.cast("B")


BASELINES: dict[str, tuple[Callable[..., None], Callable[..., Iterator[memoryview]]]] = {  # server, client
    "raw-tcp": (serve_raw_tcp, receive_raw_tcp),
    "grpcio": (serve_grpcio, receive_grpcio),
    "h2": (serve_grpcio, receive_h2),
    "seed-npsave": (partial(serve_seed, encode=np_save), partial(receive_seed, decode=np_load)),
    "seed": (partial(serve_seed, encode=np.ndarray.tobytes), partial(receive_seed, decode=np.frombuffer)),
    "rpcdataloader": (serve_rpcdataloader, receive_rpcdataloader),
}


def run_child(job: dict[str, Any]) -> None:
    """Run one end of a baseline: print one line, a port or a result, and exit when the parent process does."""
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    os.sched_setaffinity(0, job["cores"])  # before torch and grpc count the cores
    payload, (serve, receive) = PAYLOADS[job["payload"]], BASELINES[job["baseline"]]
    if "port" not in job:
        serve(payload)
        return
    batches = receive(payload, job["port"])
    for index in range(NUM_SOURCES):
        if not np.array_equal(np.frombuffer(next(batches), np.uint8), payload.batch(index)):
            raise ValueError(f"batch {index} of payload {job['payload']} arrived changed over {job['baseline']}")
    result = asdict(consume(batches, payload.size_bytes, [job["server_pid"]], **job["limits"]))
    os.write(1, json.dumps(result).encode() + b"\n")


def measure(baseline: str, payload: str, server_cores: Cores, client_cores: Cores, **limits: float | None) -> Result:
    """Run one baseline with one payload in two processes, each on its cores, within the limits of ``consume``."""
    if not any(limits.values()):
        raise ValueError("measure() needs seconds or num_batches, or it would never end")
    started: list[subprocess.Popen[str]] = []

    def child(cores: Cores, **more: Any) -> Any:
        job = json.dumps({"baseline": baseline, "payload": payload, "cores": sorted(cores), **more})
        command = [sys.executable, str(Path(__file__).resolve()), "--child", job]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        line = started[-1].stdout.readline()  # type: ignore[union-attr]  # it is a pipe
        if not line:
            raise RuntimeError(f"the {'client' if more else 'server'} of {baseline}, payload {payload}, failed")
        return json.loads(line)

    try:
        port = child(server_cores)
        return Result(**child(client_cores, port=port, server_pid=started[0].pid, limits=limits))
    finally:
        for process in started:
            process.kill()
            process.communicate()


def main() -> None:
    """Run the baselines in turn and print medians."""
    own = sorted(os.sched_getaffinity(0))
    half, core_list = max(1, len(own) // 2), lambda text: [int(core) for core in text.split(",")]
    parser = argparse.ArgumentParser(description="Measure baselines: GB/s of delivered payload, CPU seconds per GB")
    parser.add_argument("--payload", nargs="+", choices=PAYLOADS, default=list(PAYLOADS))
    parser.add_argument("--baseline", nargs="+", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--seconds", type=float, help="length of one run; default: 3, unless --batches is given")
    parser.add_argument("--batches", type=int, help="stop a run after this many batches")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--server-cores", type=core_list, default=own[:half])
    parser.add_argument("--client-cores", type=core_list, default=own[half:] or own)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args.child)
        return
    limits = {"seconds": args.seconds or (None if args.batches else 3.0), "num_batches": args.batches}
    cores = (args.server_cores, args.client_cores)
    rows = []
    for payload in args.payload:
        rounds = [[measure(name, payload, *cores, **limits) for name in args.baseline] for _ in range(args.rounds)]
        for name, runs in zip(args.baseline, zip(*rounds, strict=True), strict=True):
            _, _, speeds, *ends = zip(*(asdict(run).values() for run in runs), strict=True)
            spread = f"{min(speeds):.2f}-{max(speeds):.2f}"
            medians = [f"{statistics.median(values):.2f}" for values in (speeds, *ends)]
            rows.append([payload, name, medians[0], spread, *medians[1:]])
    headers = ["payload", "baseline", "GB/s", "min-max", "server CPU s/GB", "client CPU s/GB"]
    sys.stdout.write(draw_table(rows, headers) + "\n")


if __name__ == "__main__":
    main()
