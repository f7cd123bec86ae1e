"""Checks of what the launcher would refuse before it starts the script, by the launcher's own functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping

from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, listed, ok, problem, warning
from lightning_sm.errors import LightningSMError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.stopping import StopSchedule
from lightning_sm.job.variables import NAMES, farewell_s, prepare_s
from lightning_sm.launcher.user_code import requirements
from lightning_sm.launcher.user_code.prepare import unpacked
from lightning_sm.launcher.user_code.script import find_program, find_script, find_submission

_PREFIX = "LIGHTNING_SM_"
_SETTINGS = tuple(name.removeprefix(_PREFIX) for name in NAMES)
# The other settings are facts of the job.
_READERS: tuple[Callable[[Mapping[str, str]], object], ...] = (
    StopSchedule.from_environment,
    farewell_s,
    prepare_s,
    requirements.setting,
)


def variables(context: Context) -> Iterator[Result]:
    """Read the settings that are environment variables, and find what is almost one of them: nothing reads that.

    Args:
        context: The host.
    """
    for read in _READERS:
        if error := _error(read, context.env):
            yield problem("variables", error, "Correct the variable: the script would not be started.")
    for name in sorted(context.env):
        stated = name.removeprefix(_PREFIX)
        if stated == name or stated in _SETTINGS:
            continue
        for near in difflib.get_close_matches(stated, _SETTINGS, n=1):
            yield warning("variables", f"{name} is set, but nothing reads it.", f"Was {_PREFIX}{near} meant?")
    found = [name for name in NAMES if name in context.env]
    yield ok("variables", f"settings: {listed(found) or 'none, and so their defaults'}")


def script(context: Context) -> Iterator[Result]:
    """Look for the script that a job on this host starts.

    Args:
        context: The host.
    """
    job = context.job
    # The emulator names the script to each launcher, and nobody else does.
    if context.is_emulated or (job is None and context.error is not None):
        return
    if job is None:
        if not context.env.get("SAGEMAKER_PROGRAM"):  # a laptop, or an image whose jobs bring their script along
            return
        # An image: what it would start in a job of one host that says nothing itself.
        job = SageMakerJob("algo-1", ("algo-1",), (), "the image", context.base_dir)
    try:
        yield ok("script", _script(job, context.env))
    except LightningSMError as error:
        advice = "Name a file that is there. (What the command line of lightning-sm train names is not known here.)"
        yield problem("script", str(error), advice)


def _error(read: Callable[[Mapping[str, str]], object], env: Mapping[str, str]) -> str:
    try:
        read(env)
    except LightningSMError as error:
        return str(error)
    return ""


def _script(job: SageMakerJob, env: Mapping[str, str]) -> str:
    program, submission = find_program(None, job, env), find_submission(job, env)
    folder = None if submission is None else unpacked(submission)
    if submission is not None and folder is None:
        return f"{program.name} ({program.origin}), in the code at {submission.address}, which is not looked into"
    return f"{' '.join(find_script(program, job, env, folder).shown)} ({program.origin})"
