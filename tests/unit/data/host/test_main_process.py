"""When the main process of a data host gives its server process up; the test stands in for server processes."""

import socket
import time
from types import SimpleNamespace

import pytest

from lightning_sm.data.host.main_process import MainProcess
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.data.settings import Credentials, HostSettings

CREDENTIALS = Credentials("job", "token")
SIGKILL = -9


class Main(MainProcess):
    """A main process whose server processes die at a certain age, in seconds."""

    def __init__(self, age_s):
        super().__init__(HostSettings("127.0.0.1:0", 1, 1 << 20, None, None, "algo-3", CREDENTIALS), print)
        self.age_s = age_s
        self._start_server()

    def _start_server(self):
        self._server_starts += 1
        self._server_started = time.monotonic() - self.age_s
        self._server, self.other_end = map(MessageSocket, socket.socketpair())

    def end_servers(self, number):
        """Let server processes die one after the other; return why the host gives up."""
        for _ in range(number):
            self.other_end.close()
            self._on_server_exit(SimpleNamespace(), SIGKILL)
        return self._outcome

    def close(self):
        """Close what is open."""
        for end in (self._server, self.other_end):
            end.close()
        self._selector.close()


@pytest.fixture
def main(request):
    """A main process."""
    made = Main(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("main", [0.0], indirect=True)
def test_a_server_that_dies_again_and_again_is_given_up(main):
    """It would take the trainers' time for ever."""
    assert main.end_servers(4) is None
    assert main.end_servers(1).reason == (
        "The data host's gRPC server was killed by SIGKILL (out of memory?), 5 times in a row. See the log lines above."
    )


@pytest.mark.parametrize("main", [100.0], indirect=True)
def test_a_server_that_dies_now_and_then_is_always_started_again(main):
    """A run of days may lack memory more than five times."""
    assert main.end_servers(20) is None
