"""Jobs whose ranks are killed within an epoch, and their comparison with jobs that nothing disturbs."""

from __future__ import annotations

import sys

import pytest

from tests.integration.emulators import local
from tests.integration.faulty_jobs import said_after
from tests.integration.hosts import SCRIPTS

# Fifty times the share of the time that states take in a real job, so that a job of seconds has several.
OFTEN = {"SHARE": "0.5"}
# Two attempts of four ranks import torch eight times.
_TIMEOUT_S = 180


def run_job(folder, variables, *options):
    """Run a job of two trainers to its end; return its output."""
    work = folder / "work"
    work.mkdir(parents=True)
    given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    job = ["--group", "trainer=2", "--checkpoints", "bucket", "--env=LIGHTNING_SM_REPORT_S=0", *given, *options]
    ended = local(folder / "jobs", work, *job, "--", str(SCRIPTS / "train_and_kill.py"), timeout_s=_TIMEOUT_S)
    sys.stdout.write(ended.stdout)  # says what a rank has lost, if a comparison fails
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def restarted(folder, victims, variables, *options):
    """Run a job that is restarted once; return its output, and the step at which each rank resumes."""
    output = run_job(folder, {"LIGHTNING_SM_MAX_RESTARTS": "1", "VICTIMS": victims, **variables}, *options)
    starts = [int(step) for _, step in said_after(output, "starts at")]
    num_ranks = len(starts) // 2
    assert starts[:num_ranks] == [0] * num_ranks
    assert len(set(starts[num_ranks:])) == 1
    return output, starts[-1]


def killed(output):
    """The step at which ranks are killed, and those of the states that there are on the host of the last victim."""
    ((_, text),) = said_after(output, "kills at")
    step, *states = map(int, text.split())
    return step, states


def is_as_undisturbed(output, undisturbed, tolerance=0.0):
    """Check that both jobs end with the same weights, buffers and values, and have read the same samples.

    Args:
        output: The output of the job that was restarted.
        undisturbed: That of the other one.
        tolerance: Relative one of the values. With more than two ranks, the sums of DDP's first step after a start are
            in another order than those of the same step later, because it orders gradients as they have come in.
    """
    for words in ("ends with", "has buffers", "has loss"):
        ends, expected = (
            {text.split()[0]: [*map(float, text.split())] for _, text in said_after(one, words)}
            for one in (output, undisturbed)
        )
        assert ends.keys() == expected.keys()
        for rank, values in ends.items():
            assert values == pytest.approx(expected[rank], rel=tolerance, abs=0.0)
    # A step that was lost has been read twice.
    assert {text for _, text in said_after(output, "reads")} == {text for _, text in said_after(undisturbed, "reads")}
