"""The question before a job is submitted."""

from __future__ import annotations

import sys

from lightning_sm.errors import SubmitError


def confirm(text: str) -> None:
    """Say what is about to be submitted, and ask whether to do so.

    Args:
        text: What would be submitted.

    Raises:
        SubmitError: The answer is no, or stdin is not a terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise SubmitError(
            f"{text}\nNothing was sent: stdin is not a terminal. Add --yes to submit without being asked."
        )
    sys.stderr.write(f"{text}\nSubmit it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise SubmitError("The job was not confirmed; nothing was sent.")
