"""Tests of when a data host's main process gives up its server process, with fake server processes."""

import selectors
import socket

import pytest

from lightning_sm.data.host.main_process import MainProcess
from lightning_sm.data.ipc.host_messages import Listening, Serve
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.ipc.processes import start_module
from lightning_sm.data.settings import Credentials, HostSettings

CREDENTIALS = Credentials("job", "token")
SIGKILL = -9
TIMEOUT_S = 60.0


class Main(MainProcess):
    """A main process with fake server processes, which do nothing by themselves."""

    def __init__(self):
        super().__init__(HostSettings("127.0.0.1:0", 1, 1 << 20, None, None, "algo-3", CREDENTIALS), print)
        self._start_server()

    def _start_server(self):
        self._server, self.other_end = map(MessageSocket, socket.socketpair())
        self._selector.register(self._server, selectors.EVENT_READ)

    def end_server(self):
        """Let the server process exit, and return why the host gives up."""
        self.other_end.close()
        self._on_server_exit(SIGKILL)
        return self._outcome

    def close(self):
        """Close the sockets and the selector."""
        for end in (self._server, self.other_end):
            end.close()
        self._selector.close()


@pytest.fixture
def main():
    """A main process."""
    made = Main()
    yield made
    made.close()


def test_a_server_that_never_listens_is_given_up(main):
    """A server that exits before it listens is given up, because the next one would not listen either."""
    assert main.end_server().reason == (
        "The data host's gRPC server was killed by SIGKILL (out of memory?) before it started listening. See the log "
        "lines above."
    )


def test_a_server_that_has_listened_is_always_started_again(main):
    """A server that has listened is always restarted: a run of days may run out of memory more than once."""
    main.other_end.send(Listening("127.0.0.1:7"))
    main._on_server_messages()
    assert [main.end_server() for _ in range(20)] == [None] * 20


def test_the_owners_lightning_is_imported_before_ours(tmp_path, monkeypatch):
    """The owner's Lightning is imported first: of two installed distributions, ours derives from the imported one."""
    code = "import os, sys\nos._exit(40 + ('lightning_sm._lightning' in sys.modules))\n"
    (tmp_path / "owners_lightning.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    process, owner = start_module("lightning_sm.data.host")
    owner.send(Serve(HostSettings("127.0.0.1:0", 1, 1 << 20, None, None, "", CREDENTIALS), ["owners_lightning"]))
    assert process.wait(TIMEOUT_S) == 40
    owner.close()
