"""A local server with just enough of S3 and of a package index for downloads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeS3:
    """A server of objects.

    Attributes:
        objects: Contents by path, ``/bucket/key``; None for an object whose requests are never answered.
        failures: Number of requests to answer with a server error first.
        requests: Method and path of each request.
        asked: Event that each request sets.
        url: URL of the server.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes | None] = {}
        self.failures = 0
        self.requests: list[tuple[str, str]] = []
        self.asked = threading.Event()
        self.released = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that point boto3 at this server, with fake credentials."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "eu-west-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def _answer(self, *, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                store.requests.append((self.command, path))
                store.asked.set()
                code, body = 200, store.objects.get(path, b"")
                if body is None:
                    store.released.wait(60)
                    self.close_connection = True
                    return
                if store.failures > 0:
                    store.failures -= 1
                    code, body = 503, b""
                elif path not in store.objects:
                    code = 404
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"0"')
                if path.endswith("/"):  # a page of the package index
                    self.send_header("Content-Type", "text/html")
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
                return

        return Handler


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """Serve objects until the block ends."""
    store = FakeS3()
    thread = threading.Thread(target=store.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        store.released.set()
        store.server.shutdown()
        store.server.server_close()
        thread.join()
