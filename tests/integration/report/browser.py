"""A headless Chromium, driven through a pipe: it needs no port, driver or package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_START_S = 60.0


class Page:
    """A page in Chromium.

    Args:
        read: Descriptor for Chromium's messages.
        write: Descriptor for commands to Chromium.

    Attributes:
        requests: Addresses that the page requested, including the page itself.
        errors: Messages that the page or Chromium wrote to the console.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def open(self, file: Path, *, width: int = 1000, height: int = 844, is_dark: bool = False) -> None:
        """Load a file and wait until it is complete."""
        self.requests.clear()
        self.errors.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.absolute().as_uri())
        deadline = time.monotonic() + _START_S
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, f"{file} is not loaded after {_START_S:.0f} s"

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, file: Path, *, is_whole: bool = True) -> None:
        """Write a screenshot of the page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _START_S
        while True:
            answer = self._receive(method, deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.errors.append(json.dumps(params)[:500])

    def _receive(self, method: str, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has not answered {method} after {_START_S:.0f} s"
            data = os.read(self._read, 1 << 20)
            assert data, f"Chromium has ended before it answered {method}"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium, and stop it at the end of the context.

    Args:
        folder: Folder for Chromium's profile.
    """
    assert PROGRAM is not None, "Chromium is not installed (Debian: chromium)"
    to_browser, from_browser = os.pipe(), os.pipe()
    command = [
        PROGRAM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    # Chromium reads commands from descriptor 3 and writes to descriptor 4; only a shell can set them up.
    shell = 'exec "$@" 3<&"$IN" 4>&"$OUT"'
    env = os.environ | {"IN": str(to_browser[0]), "OUT": str(from_browser[1]), "HOME": str(folder)}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "chromium", *command],
            pass_fds=(to_browser[0], from_browser[1]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(from_browser[0], to_browser[1])
    finally:
        os.close(to_browser[1])  # makes Chromium exit
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(from_browser[0])
