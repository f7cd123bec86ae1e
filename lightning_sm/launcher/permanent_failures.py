"""Which failures of a script would come again if it were started again. Rules without I/O."""

from __future__ import annotations

import signal

from lightning_sm import errors
from lightning_sm.launcher.failure import cause_of_failure

# argparse's and jsonargparse's, and what ends a script that was told to end.
_FINAL_EXIT_CODES = frozenset({2, 128 + signal.SIGTERM, 128 + signal.SIGINT})
_FINAL_EXCEPTIONS = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
# Of our own errors, those that name a contradiction in the job. Others name a host, a port or a file.
_CONTRADICTIONS = (ValueError, ImportError, errors.NeedsLinuxError)


def is_permanent_failure(stderr_tail: str, exit_code: int) -> bool:
    """Whether a script that failed would fail in the same way again.

    Args:
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
        exit_code: Its exit code; 128 + n if signal n killed it.
    """
    if exit_code in _FINAL_EXIT_CODES:
        return True
    # Python prints "module.Class: message", and nothing else says yet which exception ended the script.
    module, _, name = cause_of_failure(stderr_tail).partition(":")[0].rpartition(".")
    if name in _FINAL_EXCEPTIONS:
        return True
    kind = getattr(errors, name, None) if module == errors.__name__ else None
    return isinstance(kind, type) and issubclass(kind, _CONTRADICTIONS)
