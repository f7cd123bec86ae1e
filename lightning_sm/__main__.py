"""The ``lightning-sm`` command: ``train`` runs on a SageMaker host, all other subcommands on any machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from lightning_sm._arguments import CommandParser
from lightning_sm._log import command_logger, show_log_lines
from lightning_sm._text import closest
from lightning_sm._version import __version__
from lightning_sm.cloud.installed import check_boto3
from lightning_sm.doctor import command as doctor
from lightning_sm.emulator import options as local
from lightning_sm.errors import JobConfigError, LightningSMError
from lightning_sm.launcher import train
from lightning_sm.report import command as report
from lightning_sm.submit import init

_LOG = command_logger(__name__)

_TRAIN_EXAMPLES = """\
examples:
  in a Dockerfile (SageMaker adds the argument "train"):
    ENV SAGEMAKER_PROGRAM=/workspace/app/train.py
    ENTRYPOINT ["lightning-sm"]
  on a SageMaker host, with the script and its subcommand named:
    lightning-sm train app/train.py fit
"""
_COMPLETION_EXAMPLES = """\
examples:
  lightning-sm completion bash > ~/.local/share/bash-completion/completions/lightning-sm
  lightning-sm completion zsh > ~/.zfunc/_lightning-sm      with fpath+=(~/.zfunc) before compinit in ~/.zshrc

Completion works in new shells. Generate the script again after an update.
"""
# Command names from other tools, each with the command that does the same here.
_ELSEWHERE = {"top": "report --live"}
# What each command does, in the order in which the help lists them.
_HELP = {
    "train": "run the training script of this SageMaker host (the container's entry point)",
    "local": "run a training script on an emulated SageMaker cluster on this machine",
    "doctor": "check this host: job, network, GPUs, disks, limits, packages",
    "report": "write a page that shows where the time of one or more runs went, or watch a running job",
    "compare": "compare time and cost of two runs for the same amount of work",
    "plan": "plan from a short run how many data workers or hosts remove the wait for data, and what the job costs",
    "init": "write a first job file for a script, with comments on what to fill in",
    "submit": "check a job file and submit it: dry run, containers on this machine, or cloud",
    "jobs": "manage jobs in the cloud: list, logs, stop, report, again",
    "completion": "print a script that completes commands and options in bash or zsh",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments. Defaults to ``sys.argv[1:]``.
    """
    show_log_lines()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except LightningSMError as error:
        _LOG.error("error: %s", error)
        return 2
    except KeyboardInterrupt:  # before the emulator has started the hosts; later, the emulator handles interrupts
        return 128 + signal.SIGINT


def _run(argv: list[str]) -> int:
    if argv[:1] == ["submit"]:  # the options are the keys of a job file
        return _submit(argv[1:])
    if argv[:1] == ["jobs"]:
        return _jobs(argv[1:])
    # Split at "--", which argparse drops or keeps depending on its version; the rest is the script's command line.
    end = argv.index("--") if "--" in argv and argv[0] == "local" else len(argv)
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    known = [*_HELP, *parser.option_names]
    if argv[0] not in known:  # argparse would report a missing command, or list all of them
        kind = "option" if argv[0].startswith("-") else "command"
        near = closest(argv[0], [*known, *_ELSEWHERE])
        hint = "" if near is None else f" Did you mean {_ELSEWHERE.get(near, near)}?"
        parser.error(f"unknown {kind} {argv[0]}.{hint}")
    options = parser.parse_args(argv[:end])
    if options.subcommand == "train":
        script, *args = options.command or [None]
        return train.train(script, args)
    if options.subcommand in _COMMANDS:
        return _for_a_reader(options)
    if end == len(argv):
        local.check_order(options)
    options.command += argv[end:] if options.command else argv[end + 1 :]
    return local.main(options)


def _for_a_reader(options: argparse.Namespace) -> int:
    """Run a command whose output is for reading; end quietly if the reader, such as ``head``, ends early."""
    try:
        code = _COMMANDS[options.subcommand](options)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at exit
        return 128 + signal.SIGPIPE
    return code


def _submit(argv: Sequence[str]) -> int:
    from lightning_sm.submit import command as submit  # noqa: PLC0415 - loads YAML, and later boto3

    return submit.main(argv, write_report=report.write_report)


def _jobs(argv: Sequence[str]) -> int:
    check_boto3("lightning-sm jobs")
    from lightning_sm.cloud import command as jobs  # noqa: PLC0415 - loads boto3
    from lightning_sm.submit.again import again  # noqa: PLC0415 - loads YAML and boto3

    # Pass the functions, because the ``jobs`` module may not import their packages.
    return jobs.main(argv, write_report=report.write_report, again=again)


def _parser(*, with_all_options: bool = False) -> CommandParser:
    """Return the parser; on request, include the options of ``submit`` and ``jobs``, which have separate parsers."""
    parser = CommandParser(prog="lightning-sm", description="Run PyTorch Lightning on Amazon SageMaker clusters.")
    parser.add_argument(
        "--version", action="version", version=f"lightning-sm {__version__}", help="show the version and exit"
    )
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="{" + ",".join(_HELP) + "}")

    def add(name: str, examples: str | None = None, details: str = "") -> CommandParser:
        text, layout = _HELP[name], argparse.RawDescriptionHelpFormatter
        description = f"{text[0].upper()}{text[1:]}.{details}"
        return commands.add_parser(name, help=text, description=description, epilog=examples, formatter_class=layout)

    train = add("train", _TRAIN_EXAMPLES, " Hyperparameters become the script's arguments.")
    train.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS]",
        help="training script and its arguments (default: hyperparameter sagemaker_program or SAGEMAKER_PROGRAM)",
    )
    emulate = add("local", local.EXAMPLES, " A host is a process group or, with --image, a container.")
    local.add_arguments(emulate)
    emulate.set_defaults(own_options=emulate.option_names)
    doctor.add_arguments(add("doctor", doctor.EXAMPLES))
    live = " With --live, watch the job in this terminal until it ends; Ctrl-C stops only this command."
    report.add_report_arguments(add("report", report.REPORT_EXAMPLES, live))
    report.add_compare_arguments(add("compare", report.COMPARE_EXAMPLES))
    report.add_plan_arguments(add("plan", report.PLAN_EXAMPLES))
    init.add_arguments(add("init", init.EXAMPLES))
    submit, jobs = add("submit"), add("jobs")
    add("completion", _COMPLETION_EXAMPLES).add_argument("shell", choices=["bash", "zsh"])
    if with_all_options:
        from lightning_sm.submit.command import add_arguments  # noqa: PLC0415 - takes time to load

        add_arguments(submit)
        if find_spec("boto3") is not None:
            from lightning_sm.cloud import command as cloud  # noqa: PLC0415 - loads boto3

            cloud.add_arguments(jobs)
    return parser


def _show_completion(options: argparse.Namespace) -> int:
    if find_spec("shtab") is None:
        raise JobConfigError("lightning-sm completion needs shtab: pip install shtab")
    import shtab  # noqa: PLC0415 - an optional dependency

    parser = _parser(with_all_options=True)
    parser.mark_completions()
    sys.stdout.write(shtab.complete(parser, shell=options.shell))
    return 0


# The commands whose functions take only the parsed options.
_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": doctor.main,
    "report": report.report,
    "compare": report.compare_runs,
    "plan": report.plan_run,
    "init": init.main,
    "completion": _show_completion,
}


if __name__ == "__main__":
    sys.exit(main())
