"""How an emulated job's output reaches the terminal and the logs of its hosts."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace

from lightning_sm.emulator.output import Output


def test_a_log_that_cannot_be_written_costs_no_line_of_the_terminal(tmp_path):
    """A full disk is reported once, and the terminal still shows every line."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "log.txt").symlink_to("/dev/full")
    shown = io.BytesIO()
    readable, writable = os.pipe()
    os.write(writable, b"one\ntwo\nthree\n")
    os.close(writable)
    host = SimpleNamespace(name="algo-1", folder=tmp_path)
    Output(SimpleNamespace(write=shown.write, flush=shown.flush, isatty=lambda: False), ["algo-1"]).copy(
        host, os.fdopen(readable, "rb")
    )
    assert shown.getvalue().decode().splitlines() == [
        f"The rest of algo-1's output is not in {tmp_path}/output/log.txt: No space left on device.",
        "algo-1 | one",
        "algo-1 | two",
        "algo-1 | three",
    ]
