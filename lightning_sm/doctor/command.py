"""The command line of ``lightning-sm doctor``."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping

from lightning_sm._arguments import positive_number
from lightning_sm.doctor import report
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.run import examine

_LOG = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  in a running container, or on a laptop:
    lightning-sm doctor
  in an image before a job is submitted:
    docker run IMAGE doctor
  in a script:
    lightning-sm doctor --strict --json > doctor.json || echo "this host is not ready"

exit codes: 0 no problem, 1 at least one (with --strict: or a warning), 2 wrong arguments
"""

# An import of torch from a cold disk is the slowest check.
_DEFAULT_TIMEOUT_S = 30.0
# If the terminal's size is unknown.
_DEFAULT_SIZE = (120, 24)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the doctor to the parser of its subcommand."""
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=_DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"time limit for all checks together, even if one hangs (default: {_DEFAULT_TIMEOUT_S:.0f})",
    )


def main(options: argparse.Namespace, env: Mapping[str, str] = os.environ) -> int:
    """Check this host, write the report to stdout and return the exit code."""
    started = time.monotonic()
    results = examine(Context.of(env, options.timeout))
    seconds = time.monotonic() - started
    code = report.exit_code(results, strict=options.strict)
    if options.json:
        text = report.as_json(results, seconds, code)
    else:
        width = shutil.get_terminal_size(_DEFAULT_SIZE).columns
        text = f"{report.table(results, width)}\n\n{report.summary(results, seconds)}"
    return code if _write(text) else 1


def _write(text: str) -> bool:
    """Write to stdout; return False if that fails."""
    if sys.stdout is None:  # the parent process closed it
        return False
    try:
        # A character that the terminal's encoding lacks must not prevent the report.
        sys.stdout.buffer.write(f"{text}\n".encode(sys.stdout.encoding or "utf-8", errors="backslashreplace"))
        sys.stdout.buffer.flush()
    except OSError as error:
        # Python would complain again when it closes stdout (Python documentation, "Note on SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a broken pipe only means that "| head" has read enough
            _LOG.error("lightning-sm doctor: the report cannot be written: %s.", error.strerror)
            return False
    return True
