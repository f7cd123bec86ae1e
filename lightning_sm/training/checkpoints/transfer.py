"""The transfer of checkpoints between hosts: files are sent to the hosts that lack them before the ranks load them.

Hosts do not share a folder while a job runs. If a checkpoint is a file, only the host of rank 0 has it; if it is a
folder, each host has the shards of its ranks. Files are sent over Gloo, whatever backend training uses, because Gloo
needs neither GPU memory nor an NCCL communicator.

A host that cannot read or write a file raises an error, and the job fails.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from lightning_sm.job.uploads import IGNORED, files_of
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.checkpoints.durable_io import disk_errors_explained
from lightning_sm.training.group_exit import gloo_group
from lightning_sm.training.rank_barrier import wait_for_all_ranks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PIECE_BYTES = 64 << 20
# SMDDP does not work alongside Gloo, so with SMDDP, each rank loads the files of its own host.
_WITHOUT_GLOO = "smddp"
# Shards of torch.distributed.checkpoint; a host receives only the parts that its ranks read.
_SHARD = ".distcp"


class HostLeaders:
    """The ranks that read and write files for their hosts: local rank 0 of each host.

    The constructor is a collective call of all ranks.

    Args:
        trainer: The Trainer, whose strategy has set up its processes.

    Attributes:
        is_leader: Whether this rank is a leader.
        ranks: The leaders' ranks, in host order.
        host: Number of this rank's host, in that order.
        num_hosts: Number of hosts that exchange files.
    """

    def __init__(self, trainer: Any) -> None:
        own = (int(trainer.node_rank), int(trainer.local_rank))
        places = of_all_ranks(own)
        nodes = [node for node, local_rank in places if local_rank == 0]
        self.is_leader = own[1] == 0
        self.ranks = [rank for rank, (_, local_rank) in enumerate(places) if local_rank == 0]
        self.host = nodes.index(own[0])
        self.num_hosts = len(nodes)
        self._hosts = [nodes.index(node) for node, _ in places]
        if self.num_hosts > 1 and distributed.get_backend() == _WITHOUT_GLOO:
            self.num_hosts = 1
        if self.num_hosts > 1:
            gloo_group(self.ranks)  # while all ranks are here

    @property
    def group(self) -> Any:
        """Process group of the leaders."""
        return gloo_group(self.ranks)

    def gather(self, value: T) -> list[T]:
        """Return the values of all hosts, in host order. A collective call of the leaders."""
        return [value] if self.num_hosts == 1 else of_all_ranks(value, self.group)

    def by_host(self, of_ranks: Sequence[set[T]]) -> list[set[T]]:
        """Return the union of the ranks' sets for each host."""
        joined: list[set[T]] = [set() for _ in range(self.num_hosts)]
        for host, values in zip(self._hosts, of_ranks, strict=True):
            joined[host] |= values
        return joined


@contextmanager
def on_every_host(trainer: Any, path: Any, folder: Path, holder: int = 0) -> Iterator[Any]:
    """Make a checkpoint readable for all ranks while they load it. A collective call of all ranks.

    A host that lacks a file, or has another file at this path, receives it once, in pieces, into ``folder``. Shards
    are received only in part: each host gets the parts that its ranks read, when they read them.

    Args:
        trainer: The Trainer.
        path: The checkpoint; rank 0's value is used. An object store's address and None are yielded unchanged.
        folder: Where this host keeps received files until the ranks have loaded them.
        holder: Number of the host whose file is used if hosts have different files at the path.

    Yields:
        The path to load, the same on all ranks.

    Raises:
        CheckpointError: This host could not read or write a file.
    """
    path = trainer.strategy.broadcast(path)
    if path is None or "://" in str(path):
        yield path
        return
    leaders = HostLeaders(trainer)
    transfer = _Transfer(leaders, Path(path), folder / f"received{IGNORED}", holder)
    if not trainer.strategy.broadcast(leaders.is_leader and transfer.is_needed()):
        yield path
        return
    try:
        if leaders.is_leader:
            transfer.receive_files()
        wait_for_all_ranks()
        with _fetched_shards(transfer):
            yield type(path)(transfer.view)
        wait_for_all_ranks()
    finally:
        transfer.remove()


class _Transfer:
    """The files of a checkpoint, in a folder (the view) of links to this host's files and of files it has received."""

    def __init__(self, leaders: HostLeaders, path: Path, folder: Path, holder: int) -> None:
        self.view = folder / path.name
        self.leaders = leaders
        self._path = path
        self._folder = folder
        self._order = [holder, *(host for host in range(leaders.num_hosts) if host != holder)]
        # The identity of each file, by host and name.
        self._files: list[dict[str, tuple[int, str]]] = []
        # The host whose file is used, by name.
        self._sources: dict[str, int] = {}

    def is_needed(self) -> bool:
        """Return whether any host lacks a file that another host has. A collective call of the leaders."""
        real = self._path.resolve()
        own = {str(file.relative_to(real)): _identity(file) for file in files_of(real)}
        self._files = self.leaders.gather(own)
        for name in sorted({name for files in self._files for name in files}):
            self._sources[name] = next(host for host in self._order if name in self._files[host])
        return any(map(self._receivers, self._sources))

    def receive_files(self) -> None:
        """Link local files into the view, and receive missing files except shards. A collective call of the leaders."""
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a process that was killed
        self._folder.mkdir(parents=True)
        for name, source in self._sources.items():
            receivers = self._receivers(name)
            if self.leaders.host not in receivers:
                place = self.view / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to((self._path / name).absolute())
            if receivers and not name.endswith(_SHARD):
                self._broadcast(name, source, is_receiver=self.leaders.host in receivers)

    def fetch(self, needed: Sequence[set[tuple[str, int, int]]]) -> None:
        """Fetch parts of shards. A collective call of the leaders.

        Args:
            needed: For each host, the parts that its ranks read: names, offsets and lengths.
        """
        # Sort the parts: all hosts must process transfers in the same order, or they would wait for each other forever.
        for host, parts in enumerate(needed):
            for name, offset, length in sorted(parts):
                if host not in self._receivers(name):
                    continue
                for start in range(offset, offset + length, _PIECE_BYTES):
                    self._pass_on(name, start, min(_PIECE_BYTES, offset + length - start), host)

    def remove(self) -> None:
        """Remove the view, once no rank of this host reads it."""
        if self.leaders.is_leader:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _receivers(self, name: str) -> list[int]:
        """Return the hosts that lack a file, or have a different file of this name; none if no host has it."""
        if name not in self._sources:
            return []
        wanted = self._files[self._sources[name]][name]
        return [host for host, files in enumerate(self._files) if files.get(name) != wanted]

    def _broadcast(self, name: str, source: int, *, is_receiver: bool) -> None:
        """Send a file from one host to all others."""
        length, _ = self._files[source][name]
        # Send an empty file as one empty piece, so that the receiver creates the file.
        for start in range(0, max(1, length), _PIECE_BYTES):
            piece = torch.empty(min(_PIECE_BYTES, length - start), dtype=torch.uint8)
            if self.leaders.host == source:
                self._read(name, start, piece)
            distributed.broadcast(piece, self.leaders.ranks[source], group=self.leaders.group)
            if is_receiver:
                self._write(name, start, piece)
        if is_receiver:
            logger.info("Received %s from another host.", self._path / name)

    def _pass_on(self, name: str, start: int, length: int, receiver: int) -> None:
        """Send a piece of a shard from the host that has it to another host."""
        source = self._sources[name]
        piece = torch.empty(length, dtype=torch.uint8)
        if self.leaders.host == source:
            self._read(name, start, piece)
            distributed.send(piece, self.leaders.ranks[receiver], group=self.leaders.group)
        elif self.leaders.host == receiver:
            distributed.recv(piece, self.leaders.ranks[source], group=self.leaders.group)
            self._write(name, start, piece)

    def _read(self, name: str, start: int, piece: Tensor) -> None:
        with (self._path / name).open("rb", buffering=0) as file:
            file.seek(start)
            rest = memoryview(piece.numpy().data)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise OSError(f"{self._path / name} ends {len(rest)} bytes too early")

    def _write(self, name: str, start: int, piece: Tensor) -> None:
        place = self.view / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with (
            disk_errors_explained(f"copy of another host's {self._path / name}", place.parent, "That one is intact."),
            place.open("r+b" if place.exists() else "w+b") as file,
        ):
            file.seek(start)
            file.write(memoryview(piece.numpy().data))


@contextmanager
def _fetched_shards(transfer: _Transfer) -> Iterator[None]:
    """Fetch the shard parts that ``torch.distributed.checkpoint`` plans to read before it reads them.

    All ranks read the same number of times, because loading such a checkpoint is a collective call.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - few checkpoints are sharded

    read = FileSystemReader.read_data

    def fetch_and_read(reader: Any, plan: Any, planner: Any) -> Any:
        if Path(reader.path) == transfer.view:
            places = [reader.storage_data[item.storage_index] for item in plan.items]
            needed = of_all_ranks({(place.relative_path, place.offset, place.length) for place in places})
            if transfer.leaders.is_leader:
                transfer.fetch(transfer.leaders.by_host(needed))
            wait_for_all_ranks()
        return read(reader, plan, planner)

    FileSystemReader.read_data = fetch_and_read  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        FileSystemReader.read_data = read  # type: ignore[method-assign]


def _identity(file: Path) -> tuple[int, str]:
    """Return a value that differs for different contents, if possible without reading the whole file.

    A zip archive, which torch.save writes, lists the checksums of its entries. Shards are named after the rank that
    wrote them, and a host has either only the shards of its ranks, or all from S3, so comparing sizes is enough.
    """
    length = file.stat().st_size
    if file.suffix == _SHARD:
        return length, ""
    digest = hashlib.blake2b(digest_size=16)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            digest.update(repr([(entry.filename, entry.CRC) for entry in archive.infolist()]).encode())
    else:
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                digest.update(piece)
    return length, digest.hexdigest()
