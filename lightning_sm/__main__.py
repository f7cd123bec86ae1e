"""The ``lightning-sm`` command: ``train`` on a SageMaker host, all others on any machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec

from lightning_sm._log import command_logger, show_log_lines
from lightning_sm._table import draw_table
from lightning_sm._version import __version__
from lightning_sm.doctor import command as doctor
from lightning_sm.emulator import options as local
from lightning_sm.errors import JobConfigError, LightningSMError, SDKError
from lightning_sm.job.redaction import shown
from lightning_sm.job.variables import SETTINGS, USER_SETTINGS
from lightning_sm.launcher import train
from lightning_sm.report import command as report
from lightning_sm.top import command as top

_LOG = command_logger(__name__)

_TRAIN_EXAMPLES = """\
examples:
  in a Dockerfile (SageMaker adds the argument "train"):
    ENV SAGEMAKER_PROGRAM=/workspace/app/train.py
    ENTRYPOINT ["lightning-sm"]
  on a SageMaker host, with the script and its subcommand named:
    lightning-sm train app/train.py fit
"""
# The commands that get their options and nothing else.
_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": doctor.main,
    "report": report.report,
    "compare": report.compare_runs,
    "plan": report.plan_run,
    "top": top.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments. Default: ``sys.argv[1:]``.
    """
    show_log_lines()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except LightningSMError as error:
        _LOG.error("error: %s", error)
        return 2
    except KeyboardInterrupt:  # before the hosts were started; after that, the emulator handles it
        return 128 + signal.SIGINT


def _run(argv: list[str]) -> int:
    if argv[:1] == ["submit"]:  # jsonargparse parses the options, which are the keys of a job file
        return _submit(argv[1:])
    if argv[:1] == ["jobs"]:
        return _jobs(argv[1:])
    # argparse drops or keeps "--" depending on its version; the words after it are the script's command line.
    end = argv.index("--") if "--" in argv and argv[0] == "local" else len(argv)
    options = _parser().parse_args(argv[:end])
    if options.subcommand == "train":
        script, *args = options.command or [None]
        return train.train(script, args)
    if options.subcommand in _COMMANDS:
        return _COMMANDS[options.subcommand](options)
    if options.subcommand == "settings":
        return _show_settings(os.environ, shows_internal=options.all)
    options.command += argv[end:] if options.command else argv[end + 1 :]
    return local.main(options)


def _submit(argv: Sequence[str]) -> int:
    from lightning_sm.submit import command as submit  # noqa: PLC0415 - loads jsonargparse and boto3

    return submit.main(argv)


def _jobs(argv: Sequence[str]) -> int:
    if find_spec("boto3") is None:
        raise SDKError("lightning-sm jobs needs boto3: pip install boto3 (the SageMaker SDK brings it along)")
    from lightning_sm.cloud import command as jobs  # noqa: PLC0415 - loads boto3

    return jobs.main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-sm", description="Run PyTorch Lightning on Amazon SageMaker clusters."
    )
    parser.add_argument(
        "--version", action="version", version=f"lightning-sm {__version__}", help="show the version and exit"
    )
    commands = parser.add_subparsers(
        dest="subcommand", required=True, metavar="{train,local,doctor,report,compare,plan,top,settings,submit,jobs}"
    )
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
        description="Check this host: its job, whether the other hosts are reachable, and what would make a job fail.",
        epilog=doctor.EXAMPLES,
    )
    doctor.add_arguments(check)
    page = add_parser(
        "report",
        help="write a page about one run, or about several: where the time went, and what to change",
        description="Write one HTML file about recorded runs, several of them side by side. It opens offline.",
        epilog=report.REPORT_EXAMPLES,
    )
    report.add_report_arguments(page)
    both = add_parser(
        "compare",
        help="compare time and cost of two runs",
        description="Compare the time and the cost of two runs for the same work.",
        epilog=report.COMPARE_EXAMPLES,
    )
    report.add_compare_arguments(both)
    planned = add_parser(
        "plan",
        help="plan data workers and hosts from a short run",
        description="Plan from a short run: how many workers or hosts remove the wait, and what the job then costs.",
        epilog=report.PLAN_EXAMPLES,
    )
    report.add_plan_arguments(planned)
    watched = add_parser(
        "top",
        help="watch a running job: hosts, states, rates, queues, events",
        description="Watch a job that runs on this machine, in this terminal. Read-only. Ctrl-C ends top, not the job.",
        epilog=top.EXAMPLES,
    )
    top.add_arguments(watched)
    show = add_parser(
        "settings",
        help="show the environment variables of lightning_sm and their values here",
        description="Show the environment variables of lightning_sm: value in this environment, default, meaning.",
        epilog="exit codes: 0 all values are valid, 2 at least one is not",
    )
    show.add_argument("--all", action="store_true", help="include the internal ones")
    add_parser("submit", help="check a job file and submit it: dry run, SDK local mode, or cloud")
    add_parser("jobs", help="look after jobs in the cloud: list, logs, stop, cost, files")
    return parser


def _show_settings(env: Mapping[str, str], *, shows_internal: bool) -> int:
    rows = []
    errors = []
    for setting in SETTINGS if shows_internal else USER_SETTINGS:
        value = "" if setting.name not in env else shown(setting.name, env[setting.name]) or "(empty)"
        rows.append([setting.name, value, setting.default_text, setting.meaning])
        try:
            setting.read(env)
        except JobConfigError as error:
            errors.append(str(error))
    headers = ["variable", "value here", "default", "meaning"]
    widths = {"value here": 24, "default": 24, "meaning": 48}
    sys.stdout.write(draw_table(rows, headers, max_widths=widths) + "\n")
    for message in errors:
        _LOG.error("error: %s", message)
    return 2 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
