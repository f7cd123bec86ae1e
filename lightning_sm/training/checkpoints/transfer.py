"""Checkpoints for all ranks: files that only some hosts have are sent to the others before the ranks load them.

Hosts share no folder while a job runs. A checkpoint that is a file lies on the host of rank 0; of one that is a folder,
each host has the shards of its own ranks. Files travel by Gloo, whatever the backend of the training is, so that they
need neither memory of a GPU nor a communicator of NCCL; only SMDDP tolerates no Gloo.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_sm._text import duration, size
from lightning_sm.errors import CheckpointError
from lightning_sm.job.uploads import IGNORED, files_of
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.group_exit import gloo_group
from lightning_sm.training.rank_barrier import wait_for_all_ranks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PIECE_BYTES = 64 << 20
# SMDDP has no new_group(), and tolerates no Gloo beside it. Its jobs have no shards.
_WITHOUT_GROUPS = ("smddp",)
# The shards of torch.distributed.checkpoint, of which a host gets the parts that its ranks read.
_SHARD = ".distcp"
# The path of the only file of a checkpoint that is a file, relative to itself.
_SELF = "."


class HostLeaders:
    """One rank of each host, local rank 0, which reads and writes files for its host.

    Making one is a collective call of all ranks. Where the backend has no groups, all ranks take part in the exchanges.

    Args:
        trainer: The Trainer, whose strategy has set up its processes.

    Attributes:
        is_leader: Whether this rank is one of them.
        takes_part: Whether this rank must make the collective calls of the leaders.
        host: Number of this rank's host, in the order of ranks.
        num_hosts: Number of hosts.
    """

    def __init__(self, trainer: Any) -> None:
        own = (int(trainer.node_rank), int(trainer.local_rank))
        places = of_all_ranks(own)
        self._ranks = [rank for rank, (_, local_rank) in enumerate(places) if local_rank == 0]
        nodes = [places[rank][0] for rank in self._ranks]
        self._hosts = [nodes.index(node) for node, _ in places]
        self.is_leader = own[1] == 0
        self.num_hosts = len(nodes)
        self.host = nodes.index(own[0])
        self._has_groups = self.num_hosts == 1 or distributed.get_backend() not in _WITHOUT_GROUPS
        self.takes_part = self.is_leader or not self._has_groups
        if self.num_hosts > 1 and self._has_groups:
            gloo_group(self._ranks)  # while all ranks are here

    def gather(self, value: T) -> list[T]:
        """Return the values of all hosts, in their order. A collective call of the leaders."""
        if not self._has_groups:
            of_ranks = of_all_ranks(value)
            return [of_ranks[rank] for rank in self._ranks]
        if self.num_hosts == 1:
            return [value]
        values: list[Any] = [None] * self.num_hosts
        distributed.all_gather_object(values, value, group=gloo_group(self._ranks))
        return values

    def by_host(self, of_ranks: Sequence[set[T]]) -> list[set[T]]:
        """Join the sets of the ranks of each host."""
        joined: list[set[T]] = [set() for _ in range(self.num_hosts)]
        for host, values in zip(self._hosts, of_ranks, strict=True):
            joined[host] |= values
        return joined

    def broadcast(self, piece: Tensor, host: int) -> None:
        """Give bytes of one host to all. A collective call of the leaders."""
        if not self._has_groups:  # as an object, which goes by the device that the backend needs
            box = [piece.numpy()]
            distributed.broadcast_object_list(box, self._ranks[host])
            piece.numpy()[:] = box[0]
            return
        distributed.broadcast(piece, self._ranks[host], group=gloo_group(self._ranks))

    def send(self, piece: Tensor, host: int) -> None:
        """Send bytes to another host, whose leader calls ``receive``."""
        distributed.send(piece, self._ranks[host], group=gloo_group(self._ranks))

    def receive(self, piece: Tensor, host: int) -> None:
        """Receive bytes of another host."""
        distributed.recv(piece, self._ranks[host], group=gloo_group(self._ranks))


@contextmanager
def on_every_host(trainer: Any, path: Any, folder: Path, holder: int = 0) -> Iterator[Any]:
    """Make a checkpoint readable for all ranks while they load it. A collective call of all ranks.

    A host that lacks a file, or has another file at this path, receives it: once per host, in pieces, into ``folder``.
    Of shards, it receives those parts that its ranks read, when they read them.

    Args:
        trainer: The Trainer.
        path: The checkpoint, as rank 0 knows it; an address of an object store and None are returned as they are.
        folder: Where this host keeps what it receives, until the ranks have loaded it.
        holder: Number of the host whose file counts if hosts have different files at the path.

    Yields:
        The path to load, the same on all ranks.

    Raises:
        CheckpointError: A host could not read or write a file.
    """
    path = trainer.strategy.broadcast(path)
    if path is None or "://" in str(path):
        yield path
        return
    leaders = HostLeaders(trainer)
    transfer = _Transfer(leaders, Path(path), folder / f"received{IGNORED}", holder)
    if not trainer.strategy.broadcast(transfer.is_needed()):
        yield path
        return
    try:
        transfer.receive_files()
        _raise_together(transfer.problem, "receive the checkpoint")
        with _fetched_shards(transfer):
            yield type(path)(transfer.view)
        wait_for_all_ranks("load the checkpoint")
    finally:
        transfer.remove()


class _Transfer:
    """The files of one checkpoint, which hosts see in a folder of links to their own files and of received ones."""

    def __init__(self, leaders: HostLeaders, path: Path, folder: Path, holder: int) -> None:
        self.view = folder / path.name
        self.leaders = leaders
        self.problem = ""
        self._path = path
        self._folder = folder
        self._order = [holder, *(host for host in range(leaders.num_hosts) if host != holder)]
        # By host and name, a text that differs for different files.
        self._files: list[dict[str, str]] = []
        # By name, the host whose file counts.
        self._sources: dict[str, int] = {}

    def is_needed(self) -> bool:
        """Return whether a host lacks a file that another one has; on ranks that take no part, False."""
        if not self.leaders.takes_part or self.leaders.num_hosts == 1:
            return False
        own: dict[str, str] = {}
        self._try(self._identify_files, own)
        self._files = self.leaders.gather(own)
        for name in sorted({name for files in self._files for name in files}):
            self._sources[name] = next(host for host in self._order if name in self._files[host])
        return any(map(self._receivers, self._sources))

    def receive_files(self) -> None:
        """Make the view: links to this host's files, and all files but shards that it lacks."""
        if not self.leaders.takes_part:
            return
        began_at = time.monotonic()
        num_bytes = 0
        self._try_as_leader(self._clear)
        for name, source in self._sources.items():
            receivers = self._receivers(name)
            is_receiver = self.leaders.host in receivers
            if not is_receiver:
                self._try_as_leader(self._link, name)
            if receivers and not name.endswith(_SHARD):
                num_bytes += self._broadcast(name, source, is_receiver=is_receiver)
        if num_bytes:
            took = duration(time.monotonic() - began_at)
            logger.info("Received %s of %s from another host in %s.", size(num_bytes), self._path, took)

    def fetch(self, needed: Sequence[set[tuple[str, int, int]]]) -> None:
        """Fetch parts of shards.

        Args:
            needed: For each host, what its ranks read: names, offsets and lengths.
        """
        if not self.leaders.takes_part:
            return
        # All hosts go through the transfers in the same order, so that no two wait for each other.
        for host, parts in enumerate(needed):
            for name, offset, length in sorted(parts):
                if host not in self._receivers(name):
                    continue
                for start in range(offset, offset + length, _PIECE_BYTES):
                    self._pass_on(name, start, min(_PIECE_BYTES, offset + length - start), host)

    def remove(self) -> None:
        """Remove the view, which no rank of this host reads any more."""
        if self.leaders.is_leader:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _identify_files(self, found: dict[str, str]) -> None:
        if self._path.is_file():
            found[_SELF] = _identity(self._path)
        else:
            found.update((str(file.relative_to(self._path)), _identity(file)) for file in files_of(self._path))

    def _receivers(self, name: str) -> list[int]:
        """Return the hosts that lack a file, or have another one of this name; none if no host has it."""
        if name not in self._sources:
            return []
        wanted = self._files[self._sources[name]][name]
        return [host for host, files in enumerate(self._files) if files.get(name) != wanted]

    def _clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a process that was killed
        self._folder.mkdir(parents=True)

    def _link(self, name: str) -> None:
        place = self.view / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to((self._path / name).absolute())

    def _broadcast(self, name: str, source: int, *, is_receiver: bool) -> int:
        """Send a file of one host to all others; return how many bytes of it this host has received."""
        is_source = self.leaders.host == source
        length = torch.zeros(1, dtype=torch.int64)
        if is_source:
            self._try(lambda: length.fill_((self._path / name).stat().st_size))
        self.leaders.broadcast(length, source)
        # A file without content is a piece without bytes, so that the receiver makes the file.
        for start in range(0, max(1, int(length)), _PIECE_BYTES):
            piece = torch.empty(min(_PIECE_BYTES, int(length) - start), dtype=torch.uint8)
            if is_source:
                self._try(self._read, name, start, piece)
            self.leaders.broadcast(piece, source)
            if is_receiver:
                self._try_as_leader(self._write, name, start, piece)
        return int(length) if is_receiver else 0

    def _pass_on(self, name: str, start: int, length: int, receiver: int) -> None:
        """Send a piece of a shard from the host that has it to another one."""
        source = self._sources[name]
        if self.leaders.host not in (source, receiver):
            return
        piece = torch.empty(length, dtype=torch.uint8)
        if self.leaders.host == source:
            self._try(self._read, name, start, piece)
            self.leaders.send(piece, receiver)
        else:
            self.leaders.receive(piece, source)
            self._try_as_leader(self._write, name, start, piece)

    def _read(self, name: str, start: int, piece: Tensor) -> None:
        with (self._path / name).open("rb", buffering=0) as file:
            file.seek(start)
            rest = memoryview(piece.numpy().data)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise EOFError(f"{self._path / name} ends {len(rest)} bytes too early")

    def _write(self, name: str, start: int, piece: Tensor) -> None:
        place = self.view / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("r+b" if place.exists() else "w+b") as file:
            file.seek(start)
            file.write(memoryview(piece.numpy().data))

    def _try_as_leader(self, act: Callable[..., object], *args: Any) -> None:
        """Change files of this host, which one of its ranks does, as ``_try``."""
        if self.leaders.is_leader:
            self._try(act, *args)

    def _try(self, act: Callable[..., object], *args: Any) -> None:
        """Keep the first error in place of raising it: other hosts wait for this one in the next transfer."""
        try:
            act(*args)
        except (OSError, EOFError) as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"


@contextmanager
def _fetched_shards(transfer: _Transfer) -> Iterator[None]:
    """Fetch what ``torch.distributed.checkpoint`` is about to read, which it knows when it has made its plan.

    Every rank reads as often as the others: a load of it is a collective call.
    """
    read = FileSystemReader.read_data

    def fetch_and_read(reader: Any, plan: Any, planner: Any) -> Any:
        if Path(reader.path) == transfer.view:
            places = [reader.storage_data[item.storage_index] for item in plan.items]
            needed = of_all_ranks({(place.relative_path, place.offset, place.length) for place in places})
            transfer.fetch(transfer.leaders.by_host(needed))
            _raise_together(transfer.problem, "receive shards of the checkpoint")
        return read(reader, plan, planner)

    FileSystemReader.read_data = fetch_and_read  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        FileSystemReader.read_data = read  # type: ignore[method-assign]


def _raise_together(problem: str, purpose: str) -> None:
    """Raise the problem of any host on all ranks, once all have come here. A collective call.

    Raises:
        CheckpointError: There is a problem.
    """
    wait_for_all_ranks(purpose)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(of_all_ranks(problem)) if text]
    if problems:
        raise CheckpointError(
            f"The hosts could not {purpose}: {'; '.join(problems)}. A host needs free space for what it receives, in "
            "its checkpoint folder or, without one, its output folder."
        )


def _identity(file: Path) -> str:
    """Return a text that differs for different contents, without reading all of a checkpoint where that is possible.

    A zip archive, which torch.save writes, lists checksums of its entries. Shards are named by the rank that has
    written them, and each host has only those of its own ranks, or all of them from S3: their sizes suffice.
    """
    length = file.stat().st_size
    if file.suffix == _SHARD:
        return str(length)
    digest = hashlib.blake2b(digest_size=16)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            digest.update(repr([(entry.filename, entry.CRC) for entry in archive.infolist()]).encode())
    else:
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                digest.update(piece)
    return f"{length} {digest.hexdigest()}"
