"""Checks of the settings and of the script, by the launcher's own functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_sm._text import listed
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, ok, problem, warning
from lightning_sm.errors import JobConfigError, LightningSMError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.variables import SETTINGS, USER_SETTINGS, misspelled
from lightning_sm.launcher.user_code.prepare import unpacked
from lightning_sm.launcher.user_code.script import find_program, find_script, find_submission

_NAMES = tuple(setting.name for setting in USER_SETTINGS)


def variables(context: Context) -> Iterator[Result]:
    """Read every setting, and find misspelled ones, which nothing reads."""
    for setting in SETTINGS:
        try:
            setting.read(context.env)
        except JobConfigError as error:  # noqa: PERF203 - one row for each
            yield problem("variables", str(error), "Correct the variable: the launcher would not start the script.")
    for name, near in misspelled(context.env).items():
        yield warning("variables", f"{name} is set, but nothing reads it.", f"Was {near} meant?")
    found = [name for name in _NAMES if name in context.env]
    yield ok("variables", f"settings: {listed(found) or 'none, so all have their defaults'}")


def script(context: Context) -> Iterator[Result]:
    """Look for the script that a job on this host starts."""
    job = context.job
    # On hosts of the emulator, only the launcher's command line names the script.
    if context.shares_machine or (job is None and context.error is not None):
        return
    if job is None:
        if not context.env.get("SAGEMAKER_PROGRAM"):  # a laptop, or an image whose jobs bring their script
            return
        # For an image, check what it would start in a job of one host that names no script itself.
        job = SageMakerJob("algo-1", ("algo-1",), (), "the image", context.base_dir)
    try:
        yield ok("script", _script(job, context.env))
    except LightningSMError as error:
        advice = (
            "Name a file that exists. (The doctor does not know a script on the command line of lightning-sm train.)"
        )
        yield problem("script", str(error), advice)


def _script(job: SageMakerJob, env: Mapping[str, str]) -> str:
    program = find_program(None, job, env)
    submission = find_submission(job, env)
    folder = None if submission is None else unpacked(submission)
    named_by = program.named_by.value
    if submission is not None and folder is None:
        return f"{program.name} ({named_by}), in the code at {submission.address}, which the doctor does not fetch"
    return f"{' '.join(find_script(program, job, env, folder).shown)} ({named_by})"
