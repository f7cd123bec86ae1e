"""States in memory from which a job restarts, of hosts that share no disk, whose ranks are killed within an epoch."""

from __future__ import annotations

import pytest

from tests.integration.faulty_jobs import said_after
from tests.integration.restarted_jobs import OFTEN, is_as_undisturbed, killed, restarted, run_job

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The output of a job of which no rank is killed, and which keeps no states."""
    outputs = {}

    def run(*options, **variables):
        key = (*options, *sorted(variables.items()))
        if key not in outputs:
            outputs[key] = run_job(tmp_path_factory.mktemp("undisturbed"), variables, *options)
        return outputs[key]

    return run


@pytest.mark.proof
def test_all_ranks_killed_at_once_cost_the_steps_since_the_last_state(tmp_path, undisturbed):
    """The launchers live on, and the newest state counts."""
    output, resumed_at = restarted(tmp_path, "0 1", {"NUM_STATES": "1", **OFTEN})
    killed_at, states = killed(output)
    assert killed_at > resumed_at == max(states) > 0
    is_as_undisturbed(output, undisturbed())


@pytest.mark.proof
def test_a_state_of_the_second_host_is_that_of_rank_0(tmp_path, undisturbed):
    """Its buffers, in which the ranks differ, are those that any checkpoint has."""
    output, resumed_at = restarted(tmp_path, "0 1", {"NUM_STATES": "2", "IS_LOST": "1", **OFTEN})
    _, states = killed(output)
    assert resumed_at == max(states) > 0
    assert "from another host" in output
    is_as_undisturbed(output, undisturbed())


@pytest.mark.proof
def test_manual_optimization_goes_on_with_its_gradients(tmp_path, undisturbed):
    """Also if one rank is killed: the others cannot know what the failed step has changed."""
    variables = {"KIND": "manual", "NUM_STATES": "1", **OFTEN}
    output, resumed_at = restarted(tmp_path, "1", {**variables, "FAIL_AT": "6"})
    _, states = killed(output)
    assert resumed_at == max(states) > 0
    is_as_undisturbed(output, undisturbed(KIND="manual"))


@pytest.mark.proof
def test_a_damaged_state_is_skipped(tmp_path, undisturbed):
    """One host has half of the file, the other one has changed bytes in it: both have an older state."""
    output, resumed_at = restarted(tmp_path, "0 1", {"NUM_STATES": "2", "IS_DAMAGED": "1", **OFTEN})
    _, states = killed(output)
    assert resumed_at == min(states) > 0
    assert f"step={max(states)}.ckpt is truncated at " in output
    is_as_undisturbed(output, undisturbed())


@pytest.mark.proof
def test_without_room_the_training_goes_on(tmp_path, undisturbed):
    """Each host says so once, and a restart has what it has without states."""
    output, resumed_at = restarted(tmp_path, "0 1", {"ROOM": "100k", "FAIL_AT": "12", **OFTEN})
    assert resumed_at == 0
    hosts = [host for host, _ in said_after(output, "This host keeps no further states in memory for a restart")]
    assert sorted(hosts) == ["algo-1", "algo-1", "algo-2", "algo-2"]  # in two attempts
    is_as_undisturbed(output, undisturbed())


@pytest.mark.matrix(rows=["store of the job"])
@pytest.mark.parametrize(
    ("victim", "options"),
    [
        pytest.param("0", [], id="rank 0, whose process has the store of the job"),
        pytest.param("0", ["--devices", "2"], id="rank 0 of four"),
        pytest.param("1", ["--devices", "2"], id="the other rank of its host"),
        pytest.param("3", ["--devices", "2"], id="a second local rank"),
        pytest.param("1", ["--group", "data=1"], id="a trainer of data hosts"),
    ],
)
def test_a_killed_rank_costs_no_step(tmp_path, undisturbed, victim, options):
    """Wherever it is: the others save the step at which it is killed."""
    variables = {"NUM_RANKS": "4" if "--devices" in options else "2", "STEP_S": "0.2"}
    output, resumed_at = restarted(tmp_path, victim, variables, *options)
    assert resumed_at == killed(output)[0]
    is_as_undisturbed(output, undisturbed(*options, **variables), 1e-5 if "--devices" in options else 0.0)


@pytest.mark.proof
def test_buffers_of_rank_0_outlive_it_beside_an_average_of_the_weights(tmp_path, undisturbed):
    """A callback that loads weights and buffers does not put those of the rank that has saved in their place."""
    variables = {"KIND": "averaged", "STEP_S": "1.0"}
    output, resumed_at = restarted(tmp_path, "0", variables)
    assert resumed_at == killed(output)[0]
    is_as_undisturbed(output, undisturbed(**variables))
