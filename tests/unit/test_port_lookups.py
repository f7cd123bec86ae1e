"""The check of ``make lint`` for ports that are looked up and bound later."""

from __future__ import annotations

from tests.lint.ports import ports_bound_later

_LOOKED_UP = """
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]

def port():
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]

def closed():
    free = socket.socket()
    free.bind(("", 0))
    port = str(free.getsockname()[1])
    free.close()
    return port

def closed_whatever_happens():
    free = socket.socket()
    try:
        free.bind(("", 0))
        return free.getsockname()[1]
    finally:
        free.close()
"""
_KEPT = """
with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    serve(taken)

taken = socket.create_server(("127.0.0.1", 0))
port = taken.getsockname()[1]
serve(port)
taken.close()

class Server:
    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def close(self):
        self.listener.close()
"""


def test_a_port_of_a_socket_that_is_closed_before_it_is_used_is_found(tmp_path):
    """The check reports only ports whose socket is closed before the port is used."""
    (tmp_path / "a.py").write_text(_LOOKED_UP)
    (tmp_path / "b.py").write_text(_KEPT)
    assert ports_bound_later(tmp_path) == [f"{tmp_path}/a.py:{line}" for line in (2, 6, 11, 18)]
