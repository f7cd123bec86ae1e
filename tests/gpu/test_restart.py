"""A restart within the job on a GPU: states that a stream of their own copies, and what is lost without a state."""

import pytest

from tests.gpu import staged
from tests.integration.restarted_jobs import OFTEN, is_as_undisturbed, killed, restarted, run_job

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

# Two hosts that share a GPU, and dropout of which shows whether the GPU's random state goes on.
VARIABLES = {"CUDA_VISIBLE_DEVICES": "0", "ACCELERATOR": "gpu", "BACKEND": staged.NAME, "STEP_S": "0.2"}
OPTIONS = ("--group", "data=1")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The output of a job of which no rank is killed."""
    return run_job(tmp_path_factory.mktemp("undisturbed"), VARIABLES, *OPTIONS)


def test_a_killed_rank_costs_no_step(tmp_path, undisturbed):
    """The other one saves the step, the GPU's random state included."""
    output, resumed_at = restarted(tmp_path, "1", VARIABLES, *OPTIONS)
    assert resumed_at == killed(output)[0]
    is_as_undisturbed(output, undisturbed, TOLERANCE)


def test_all_ranks_killed_at_once_cost_the_steps_since_the_last_state(tmp_path, undisturbed):
    """States are copied beside the training, and are those of their step."""
    output, resumed_at = restarted(tmp_path, "0 1", {"NUM_STATES": "1", **VARIABLES, **OFTEN}, *OPTIONS)
    killed_at, states = killed(output)
    assert killed_at > resumed_at == max(states) > 0
    is_as_undisturbed(output, undisturbed, TOLERANCE)
