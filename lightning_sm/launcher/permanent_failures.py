"""Failures of a script that would recur if it were started again. Rules without I/O."""

from __future__ import annotations

import signal

from lightning_sm import errors
from lightning_sm.launcher.failure import cause_of_failure

# Those of argparse and jsonargparse, and of a script that was told to exit.
_FINAL_EXIT_CODES = frozenset({2, 128 + signal.SIGTERM, 128 + signal.SIGINT})
_FINAL_EXCEPTIONS = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
# Base classes of our own errors that name a contradiction in the job. The others name a host, a port or a file, and so
# may pass.
_CONTRADICTIONS = (ValueError, ImportError, errors.NeedsLinuxError)


def is_permanent_failure(stderr_tail: str, exit_code: int) -> bool:
    """Return whether a script that failed would fail in the same way again.

    Args:
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
        exit_code: Exit code of the script; 128 + n if signal n killed it.
    """
    if exit_code in _FINAL_EXIT_CODES:
        return True
    # Python prints "module.Class: message", the only source yet for which exception ended the script.
    module, _, name = cause_of_failure(stderr_tail).partition(":")[0].rpartition(".")
    if name in _FINAL_EXCEPTIONS:
        return True
    kind = getattr(errors, name, None) if module == errors.__name__ else None
    return isinstance(kind, type) and issubclass(kind, _CONTRADICTIONS)
