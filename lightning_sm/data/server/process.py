"""The gRPC server's process of a data host: moves bytes between workers and trainers, and runs no code of the user."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
from msgspec import structs

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.ipc import host_messages
from lightning_sm.data.ipc.messages import Message, MessageSocket, NothingReceivedError
from lightning_sm.data.ipc.processes import connection_to_parent, run_and_exit
from lightning_sm.data.protocol import calls
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.figures import RankFigures
from lightning_sm.data.protocol.openings import OpeningsRequest, ResultRequest
from lightning_sm.data.protocol.spec import CHUNK_BYTES, LoaderDescription, StepRangeSpec, snapshot_hash
from lightning_sm.data.server.leases import Leases
from lightning_sm.data.server.listener import Listener
from lightning_sm.data.server.network import NetworkProcesses
from lightning_sm.data.server.openings import Openings
from lightning_sm.data.server.peers import TrustedPeers
from lightning_sm.data.server.sampler_orders import SamplerOrderCache
from lightning_sm.data.server.shard_counts import ShardCounts
from lightning_sm.data.server.stream import FetchMethod, nothing
from lightning_sm.data.server.worker_pool import Answer, Task, WorkerPool
from lightning_sm.data.settings import MAX_SHARDS, HostSettings
from lightning_sm.errors import DataHostMismatchError, DataSettingsError, WireError

logger = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")
_Request = TypeVar("_Request", calls.ListRequest, calls.CountRequest)

# A call that waits for the user's setup() answers "not yet" after this time, so that the trainer can log it.
_CALL_TIMEOUT_S = 5.0

# The user's hooks run one after the other, a sampler in a process of its own, and counts in the workers: what is not
# finished yet is bounded. Trainers have a handful of stages, and a few loaders for each.
_MAX_RUNNING = 32

_MAX_OUTCOME_CHARS = 1000

# The main process keeps this many snapshots: those of two DataModules that take turns, with their states.
_NUM_SNAPSHOTS = 4

# Stopping takes at most this long, in which trainers are notified that this host exits.
_STOP_TIMEOUT_S = 1.0


class ServerProcess:
    """The gRPC server and its state.

    Args:
        main: Connection to the main process of the data host.
        settings: Address, limits, credentials.
        snapshots: Digests of the snapshots that the main process has, the newest last.
    """

    def __init__(self, main: MessageSocket, settings: HostSettings, snapshots: list[str]) -> None:
        self._main = main
        self._settings = settings
        self._pool = WorkerPool(
            lambda worker: self._send(host_messages.KillWorker(worker)),
            lambda worker, seconds: self._send(host_messages.ShowStack(worker, seconds)),
        )
        self._leases = Leases(
            settings.lease_s, settings.startup_timeout_s, time.monotonic(), may_restart=settings.may_restart
        )
        self._leasing = threading.Lock()
        self._changed = threading.Condition()
        self._running: set[str] = set()  # names of the requests whose hooks run
        self._opened: dict[str, calls.SetUp | calls.Loaders | calls.Problem] = {}
        self._snapshots = snapshots
        self._sampler_orders = SamplerOrderCache(
            lambda loader_pass, timeout_s: self._send(host_messages.RunSampler(loader_pass, timeout_s))
        )
        self._shard_counts = ShardCounts(self._pool)
        self._live_loaders: list[str] = []
        self._keeping = threading.Lock()
        self._openings = Openings(self._send, lambda digest: digest in self._snapshots, self._keep_workers)
        self._fetch = FetchMethod(self._start)
        self._network: NetworkProcesses | None = None
        self._figures: dict[str, RankFigures] = {}  # by trainer rank
        self._hosts: dict[str, str] = {}  # by trainer rank
        self._peers = TrustedPeers(settings)
        self._handlers = {
            "OpenSources": grpc.unary_unary_rpc_method_handler(self._open_sources),
            "Result": grpc.unary_stream_rpc_method_handler(self._result),
            "Open": grpc.unary_unary_rpc_method_handler(self._open),
            "Load": grpc.stream_unary_rpc_method_handler(self._load),
            "List": grpc.stream_stream_rpc_method_handler(self._list),
            "Count": grpc.unary_unary_rpc_method_handler(self._count),
            "Fetch": self._fetch.handler(),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(self._heartbeat),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "Finish": grpc.unary_unary_rpc_method_handler(self._finish),
        }

    def run(self) -> None:
        """Serve until the main process closes the connection."""
        try:
            listener = Listener(self._handlers, self._settings, self._peers)
        except DataSettingsError as error:
            self._send(host_messages.Finished(str(error), is_error=True))
            return
        settings = replace(self._settings, address=listener.address)
        self._network = NetworkProcesses(settings, self._start, self._pool.worker_ids)
        listener.start()
        self._send(host_messages.Listening(listener.address))
        while True:
            try:
                message = self._main.receive(timeout_s=0.5)
            except NothingReceivedError:
                with self._leasing:
                    outcome = self._leases.outcome(time.monotonic())
                    running = self._leases.running(time.monotonic())
                self._openings.keep(running)
                if outcome is not None:
                    self._send(outcome)
                continue
            if message is None:
                break
            self._handle(message)
        self._fetch.close()
        self._network.close()
        listener.stop(_STOP_TIMEOUT_S)
        self._pool.close()

    def _handle(self, message: Message) -> None:
        match message:
            case host_messages.NewWorker(fds=()):
                logger.debug("The connection to a worker is lost: it exits, and the main process starts another.")
            case host_messages.NewWorker():
                self._pool.add(message)
            case host_messages.WorkerLost(worker, why):
                self._pool.lose(worker, why)
            case host_messages.WorkerStuck(worker, where):
                self._pool.note_stuck(worker, where)
            case host_messages.JobEnds():
                with self._leasing:
                    self._leases.expect_no_more()
            case host_messages.OpenedLoaders():
                self._take_reply(message)
            case host_messages.StartedWorkers():
                self._keep_workers()  # before ranks are told that they may send requests
                self._openings.take(message)
            case host_messages.SamplerOutput():
                self._sampler_orders.take(message)

    def _take_reply(self, message: host_messages.OpenedLoaders) -> None:
        """Keep a reply, and those that still hold. If a trainer asks for another one, the hook runs again."""
        self._live_loaders = message.live
        self._keep_workers()
        with self._changed:
            self._running.discard(message.opening)
            # A problem holds until a trainer has got it.
            self._opened = {
                name: reply
                for name, reply in self._opened.items()
                if name in message.live or isinstance(reply, calls.Problem)
            }
            self._opened[message.opening] = message.reply
            self._changed.notify_all()

    def _keep_workers(self) -> None:
        with self._keeping:  # what is live now must not be replaced by what was
            self._pool.keep({*self._live_loaders, *self._openings.live})

    def _send(self, message: Message) -> None:
        try:
            self._main.send(message)
        except OSError:
            logger.debug("The main process has exited; this process exits, too.")

    # gRPC methods

    def _open(self, request: bytes, context: Any) -> bytes:
        wanted = _parse(calls.OpenRequest.parse, request, context)
        opening = wanted.opening
        with self._changed:
            if opening not in self._running and opening not in self._opened:
                missing = [digest for digest in wanted.snapshots if digest not in self._snapshots]
                if missing or not wanted.datamodule:  # only rank 0 has it
                    return calls.Missing(missing).encode()
                self._check_number("Open", len(self._running), context)
                self._running.add(opening)
                self._send(host_messages.RunHook(wanted))
            self._changed.wait_for(lambda: opening in self._opened, _CALL_TIMEOUT_S)
            reply = self._opened.get(opening, calls.Running())
            if isinstance(reply, calls.Problem):
                # The hooks run again for the next trainer that asks: the cause may be gone, such as a full disk.
                del self._opened[opening]
        return reply.encode()

    def _open_sources(self, request: bytes, context: Any) -> bytes:
        wanted = _parse(OpeningsRequest.parse, request, context)
        with self._leasing:
            if not self._leases.has(wanted.client):
                context.abort(grpc.StatusCode.NOT_FOUND, f"{wanted.client} has sent no heartbeat")
        return self._openings.open(wanted, _CALL_TIMEOUT_S).encode()

    def _result(self, request: bytes, context: Any) -> Iterator[bytes]:
        wanted = _parse(ResultRequest.parse, request, context)
        result = self._openings.result(wanted.call)
        if result is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{wanted.call} is not open")
            return
        encoded = result.encode()
        yield from (encoded[start : start + CHUNK_BYTES] for start in range(0, len(encoded), CHUNK_BYTES))

    def _load(self, requests: Iterator[bytes], context: Any) -> bytes:
        """Take a snapshot of rank 0, and give it to the main process, which runs code of it."""
        self._peers.require_trusted(context)
        head = _parse(calls.LoadRequest.parse, next(requests, b""), context)
        fd = os.memfd_create("lightning_sm_snapshot", os.MFD_CLOEXEC)
        try:
            digest = snapshot_hash()
            num_received = 0
            for piece in requests:
                num_received += len(piece)
                if num_received > head.num_bytes:
                    break
                digest.update(piece)
                os.write(fd, piece)
            if num_received != head.num_bytes or digest.hexdigest() != head.digest:
                why = f"a snapshot of {head.num_bytes} bytes came with {num_received}, and another digest"
                context.abort(grpc.StatusCode.DATA_LOSS, why)
            with self._changed:
                others = [known for known in self._snapshots if known != head.digest]
                wanted = self._openings.sources
                kept = [known for known in others[: 1 - _NUM_SNAPSHOTS] if known in wanted]
                self._snapshots = [*kept, *others[1 - _NUM_SNAPSHOTS :], head.digest]
                self._send(host_messages.NewSnapshot(head.digest, self._snapshots, (fd,)))
        finally:
            os.close(fd)
        return b"{}"

    def _list(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        wanted = self._parse_for_loader(calls.ListRequest, next(requests, b""), context, self._sampler_orders)
        try:
            yield from self._sampler_orders.answer(wanted, _CALL_TIMEOUT_S)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _count(self, request: bytes, context: Any) -> bytes:
        wanted = self._parse_for_loader(calls.CountRequest, request, context, self._shard_counts)
        return self._shard_counts.answer(wanted, _CALL_TIMEOUT_S, context.is_active).encode()

    def _parse_for_loader(
        self, kind: type[_Request], request: bytes, context: Any, cache: SamplerOrderCache | ShardCounts
    ) -> _Request:
        """Parse a request that runs code of a loader, and check that the loader is open and that not too many run."""
        wanted = _parse(kind.parse, request, context)
        loaders = self._loaders(wanted.opening)
        if wanted.loader >= len(loaders):
            context.abort(grpc.StatusCode.NOT_FOUND, self._not_open(wanted.opening, wanted.loader))
        if (loaders[wanted.loader].order == "shards") is not (kind is calls.CountRequest):
            why = f"{kind.NAME} request for {loaders[wanted.loader].name}, which has a different kind of order"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        if not cache.is_known(wanted):
            self._check_number(kind.NAME, cache.num_running, context)
        return wanted

    def _start(self, client: object, encoded_spec: bytes, answer: Callable[[Answer], None]) -> Callable[[], None]:
        """Queue a request for the workers, and return what cancels it.

        Raises:
            WireError: It is malformed.
        """
        if not encoded_spec.startswith(b"["):  # it is no JSON: a request for batches of a source
            own = FetchSpec.decode(encoded_spec)
            # Only the worker of a stream can continue it, batch by batch.
            task = Task(client, own.opening, encoded_spec, answer, None if own.indices else (own.opening, 0, 0))
            self._pool.submit(task)
            return partial(self._pool.cancel, task)
        spec = StepRangeSpec.decode(encoded_spec)
        loaders = self._loaders(spec.opening)
        if not 0 <= spec.loader < len(loaders):
            answer(Failure("NotOpen", self._not_open(spec.opening, spec.loader)))
            return nothing
        # Only the worker that has the iterator of a virtual shard can continue it.
        is_shard = loaders[spec.loader].order == "shards"
        affinity = (spec.opening, spec.loader, _shard_of(spec)) if is_shard else None
        if spec.built_by is not None:
            affinity = None
        task = Task(client, spec.opening, encoded_spec, answer, affinity, spec.built_by)
        self._pool.submit(task)
        return partial(self._pool.cancel, task)

    def _loaders(self, opening: str) -> list[LoaderDescription]:
        reply = self._opened.get(opening)
        return reply.loaders if isinstance(reply, calls.Loaders) else []

    def _not_open(self, opening: str, loader: int) -> str:
        return f"loader {loader} of {opening} is not open on data host {self._settings.name}"

    def _check_number(self, name: str, num_running: int, context: Any) -> None:
        """Refuse a call that would start the user's code while too many calls of it are unfinished."""
        if num_running >= _MAX_RUNNING:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"data host {self._settings.name} is running {num_running} different {name} requests, and allows only "
                f"{_MAX_RUNNING} at a time",
            )

    def _heartbeat(self, request: bytes, context: Any) -> bytes:
        beat = _parse(calls.HeartbeatRequest.parse, request, context)
        try:
            with self._leasing:
                self._leases.heartbeat(beat.client, beat.world_size, time.monotonic())
                self._hosts[beat.client] = beat.host
                if beat.figures is not None:
                    self._figures[beat.client] = beat.figures
                figures = dict(self._figures) if beat.wants_figures else {}
        except DataHostMismatchError as error:
            # Not final: the trainer tries again, and the others may have ended by then.
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        port = self._network.port_for(beat.client) if self._network is not None else 0
        return self._report(figures, port).encode()

    def _status(self, _request: bytes, _context: Any) -> bytes:
        """Answer a call that only looks: it needs no lease, and grants none."""
        with self._leasing:
            figures, hosts = dict(self._figures), dict(self._hosts)
        return structs.replace(self._report(figures), hosts=hosts, channels=self._settings.channels).encode()

    def _report(self, figures: dict[str, RankFigures], stream_port: int = 0) -> calls.HostReport:
        # As many workers as configured: the first heartbeat comes before any is forked, and trainers decide by it how
        # many batches to request.
        report = self._pool.report(self._settings.name)
        return structs.replace(report, workers=self._settings.workers, figures=figures, stream_port=stream_port)

    def _finish(self, request: bytes, context: Any) -> bytes:
        last = _parse(calls.FinishRequest.parse, request, context)
        client = last.client
        problem = "" if last.is_success else last.outcome[:_MAX_OUTCOME_CHARS]
        with self._leasing:
            if not self._leases.has(client):
                context.abort(
                    grpc.StatusCode.NOT_FOUND,
                    f"{client} has sent no heartbeat to data host {self._settings.name}, which does not wait for it",
                )
            # Before the answer: as soon as the trainer has it, the trainer may exit, and this host may get SIGTERM.
            self._send(host_messages.TrainerFinished(last.is_success))
            self._leases.finish(client, problem, time.monotonic())
            self._figures.pop(client, None)
            self._hosts.pop(client, None)
        return b"{}"


def _shard_of(spec: StepRangeSpec) -> int:
    """Return the shard to which all batches of a request belong, as consecutive ones."""
    keys = [batch.keys.tolist() for batch in spec.batches]
    match keys[0]:
        case [num_shards, shard, offset, is_wanted] if 0 <= shard < num_shards <= MAX_SHARDS and offset >= 0:
            if keys == [[num_shards, shard, offset + number, is_wanted] for number in range(len(keys))]:
                return int(shard)
    raise WireError(f"a request for shards with the keys {[batch.keys[:8].tolist() for batch in spec.batches[:8]]}")


def _parse(parse: Callable[[bytes], _Parsed], request: bytes, context: Any) -> _Parsed:
    try:
        return parse(request)
    except WireError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise  # never reached: abort raises


def main() -> None:
    """Run the server process; the argument is the descriptor of the connection to the main process."""
    # A stopped process does not notice that the connection was closed.
    kill_with_parent()
    main_process = connection_to_parent()
    serve = main_process.receive()
    if isinstance(serve, host_messages.Serve):
        ServerProcess(main_process, serve.settings, serve.snapshots).run()


if __name__ == "__main__":
    run_and_exit(main)
