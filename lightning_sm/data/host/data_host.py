"""The ``DataHost``, which builds batches on this machine, for tests and for clusters that are set up by hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

from lightning_sm.data.ipc.host_messages import Finished, Listening, Serve
from lightning_sm.data.ipc.messages import MessageSocket, NothingReceivedError
from lightning_sm.data.ipc.processes import describe_exit, start_module
from lightning_sm.data.protocol.tls import read_tls
from lightning_sm.data.settings import Credentials, DataServiceSettings, HostSettings
from lightning_sm.errors import DataServiceError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.host_keys import new_secret
from lightning_sm.job.variables import JOB_SECRET

_MAIN_PROCESS = "lightning_sm.data.host"

# Rank 0's DataModule derives from a class in one of these packages. The data host imports the same one as this process.
_LIGHTNING = ("pytorch_lightning", "lightning.pytorch")

# Importing torch and Lightning has taken more than a minute on busy machines and from network drives. If the process
# exits, the wait ends at once.
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 15.0

_MAKING_SECRET = threading.Lock()

# Job name for data hosts and trainers that are set up by hand.
LOCAL_JOB = "local"


class DataHost:
    """A data host that runs in separate processes for the duration of a ``with`` block.

    Example::

        with DataHost(workers=4) as host:
            trainer.fit(model, RemoteDataModule(MyDataModule("data"), addresses=[host.address]))

    Like ``DataLoader`` workers, it receives the loaders' datasets pickled. Your script's classes and functions are
    pickled by value, without the globals that they look up by string in ``globals()``.

    Its processes import torch and Lightning, which takes as long as it does in your script.

    It accepts connections from this machine and from ``settings.trust``. Without a job secret, it sets
    ``LIGHTNING_SM_JOB_SECRET`` to a random value in this process, for ``RemoteDataModule`` and for ranks that this
    process starts. To train from another terminal, set the same ``LIGHTNING_SM_JOB_SECRET`` there.

    Args:
        address: Address to listen on, as ``host:port``; with port 0, the system chooses a port.
        workers: Number of worker processes.
        settings: Limits and credentials.
        job: Name of the job; trainers must use the same name.
        name: Name of the host in messages. Defaults to its address.

    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        workers: int = 2,
        *,
        settings: DataServiceSettings | None = None,
        job: str = LOCAL_JOB,
        name: str = "",
    ) -> None:
        settings = settings or DataServiceSettings()
        _ensure_secret()
        self.address = address
        self._settings = HostSettings(
            address=address,
            workers=workers,
            max_batch_bytes=settings.max_batch_bytes,
            lease_s=None,
            startup_timeout_s=None,
            name=name,
            credentials=Credentials.of(settings, job),
            trusted=list(settings.trust or ()),
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: MessageSocket | None = None

    def __enter__(self) -> DataHost:
        """Start the processes, and wait until they listen.

        Raises:
            DataSettingsError: A TLS file is missing or invalid.
            DataServiceError: The host does not start, for example because its address is in use.
            NeedsLinuxError: This system is not Linux.
        """
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            process, sock = self._start()
            sock.send(Serve(self._settings, [name for name in sys.modules if name in _LIGHTNING]))
            try:
                answer = sock.receive(_START_TIMEOUT_S)
            except NothingReceivedError as error:
                raise DataServiceError(
                    f"The data host at {self.address} is not listening after {_START_TIMEOUT_S:g} s: its process "
                    "is still importing torch and Lightning. Start it on a less busy machine."
                ) from error
            if not isinstance(answer, Listening):
                text = answer.reason if isinstance(answer, Finished) else describe_exit(process.wait())
                raise DataServiceError(f"The data host at {self.address} did not start:\n{text}")
            on_error.pop_all()
        self.address = answer.address
        return self

    def _start(self) -> tuple[subprocess.Popen[bytes], MessageSocket]:
        """Start the main process, and return the process and the connection to it."""
        read_tls(self._settings.credentials)
        self._process, self._socket = start_module(_MAIN_PROCESS)
        return self._process, self._socket

    def __exit__(self, *_: object) -> None:
        """Stop the processes, even while trainers are connected."""
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the main process; the workers and the server process are its children."""
        if self._process is None:
            raise DataServiceError("The data host has not been started: use it in a with statement.")
        return self._process.pid

    def close(self) -> None:
        """Stop the processes of the host."""
        if self._process is None or self._socket is None:
            return
        self._process.terminate()  # while importing, it would not notice the closed connection
        self._socket.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ensure_secret() -> None:
    """Set a secret for this process and its children, unless it has one or runs in a job, which sets its own."""
    with _MAKING_SECRET:  # several threads may create data hosts
        if JOB_SECRET.read(os.environ) is None and SageMakerJob.from_environment() is None:
            os.environ.update(new_secret())
