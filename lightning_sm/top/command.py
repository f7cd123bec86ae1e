"""The options of ``lightning-sm top``."""

from __future__ import annotations

import argparse
import math

EXAMPLES = """\
examples:
  the newest job that runs on this machine, emulated or in this container:
    lightning-sm top
  once, for a script:
    lightning-sm top --once --json
  on a host of a job in the cloud, which needs remote debugging (EnableRemoteDebug) and SSM:
    aws ssm start-session --target sagemaker-training-job:NAME_algo-1
    lightning-sm top

exit codes: 0 the job has ended, or was shown; 1 no such job runs here; 2 an option is wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of the subcommand."""
    parser.add_argument("job", nargs="?", help="name of the job, or the end of it (default: the newest that runs here)")
    parser.add_argument("--once", action="store_true", help="show it once, and exit")
    parser.add_argument("--json", action="store_true", help="write a line of JSON instead of a table")
    parser.add_argument(
        "--every",
        type=_seconds,
        metavar="SECONDS",
        help="time between two updates (default: 1 in a terminal, 10 elsewhere)",
    )


def main(options: argparse.Namespace) -> int:
    """Watch a job until it ends or Ctrl-C is pressed, and return the exit code."""
    from lightning_sm.top import loop  # noqa: PLC0415 - loads gRPC and rich, which the launcher must not

    return loop.watch(options.job, every_s=options.every, is_once=options.once, is_json=options.json)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.2 <= seconds <= 3600:  # noqa: PLR2004 - stated in the message
        raise argparse.ArgumentTypeError(f"{text}: expected 0.2 to 3600 seconds")
    return seconds
