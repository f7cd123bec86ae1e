"""The ``lightning-sm`` command: ``train`` on a SageMaker host, ``local``, ``doctor`` and ``submit`` on any machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial

from lightning_sm._log import show_log_lines
from lightning_sm.doctor import command as doctor
from lightning_sm.emulator import options as local
from lightning_sm.errors import LightningSMError
from lightning_sm.launcher import train

_LOG = logging.getLogger(__name__)

_TRAIN_EXAMPLES = """\
examples:
  in a Dockerfile (SageMaker adds the argument "train"):
    ENV SAGEMAKER_PROGRAM=/workspace/app/train.py
    ENTRYPOINT ["lightning-sm"]
  on a SageMaker host, with the script and its subcommand named:
    lightning-sm train app/train.py fit
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments. Default: those of this process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    show_log_lines()
    try:
        if given[:1] == ["submit"]:  # its options are those of a job file, which argparse knows nothing of
            return _submit(given[1:])
        # argparse drops or keeps "--" depending on its version; what follows it is the script's alone.
        at = given.index("--") if "--" in given and given[0] == "local" else len(given)
        options = _parser().parse_args(given[:at])
        if options.subcommand == "train":
            script, *args = options.command or [None]
            return train.train(script, args)
        if options.subcommand == "doctor":
            return doctor.main(options)
        options.command += given[at:] if options.command else given[at + 1 :]
        return local.main(options)
    except LightningSMError as error:
        _LOG.error("lightning-sm: error: %s", error)
        return 2
    except KeyboardInterrupt:  # before the hosts were started; later the emulator itself listens
        return 128 + signal.SIGINT


def _submit(argv: Sequence[str]) -> int:
    from lightning_sm.submit import command as submit  # noqa: PLC0415 - loads jsonargparse and boto3

    return submit.main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-sm", description="Run PyTorch Lightning on Amazon SageMaker clusters."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="{train,local,doctor,submit}")
    add_parser = partial(commands.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    train = add_parser(
        "train",
        help="run the training script of this SageMaker host (the container's entry point)",
        description="Run the training script of this SageMaker host, with arguments from hyperparameters.json.",
        epilog=_TRAIN_EXAMPLES,
    )
    train.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS]",
        help="training script and its arguments (default: hyperparameter sagemaker_program or SAGEMAKER_PROGRAM)",
    )
    emulate = add_parser(
        "local",
        help="run a training script on an emulated cluster on this machine",
        description="Run a training script on an emulated SageMaker cluster: one process group per host, no AWS.",
        epilog=local.EXAMPLES,
    )
    local.add_arguments(emulate)
    check = add_parser(
        "doctor",
        help="check this host: job, network, GPUs, disks, limits, packages",
        description="Check this host: what the job is, whether the others can be reached, and what it would fail on.",
        epilog=doctor.EXAMPLES,
    )
    doctor.add_arguments(check)
    add_parser("submit", help="check a job file and submit it: dry run, SDK local mode, or cloud")
    return parser


class _Version(argparse.Action):
    """Read the version when it is asked for, as it is only known where the package is installed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.exit(message=f"lightning-sm {importlib.metadata.version('lightning-sm')}\n")


if __name__ == "__main__":
    sys.exit(main())
