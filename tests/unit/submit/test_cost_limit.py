"""The maximum cost of a job."""

import io
import sys
from dataclasses import replace

import pytest

from lightning_sm.errors import SubmitError
from lightning_sm.submit.cost_limit import confirm_cost, cost_problems
from lightning_sm.submit.job_file import Spot, Tune
from lightning_sm.submit.preflight import check
from tests.unit.submit.test_request import JOB

# Two GPU hosts and one CPU host for two hours.
JOB = replace(JOB, prices={"ml.g5.xlarge": 1.5, "data": 0.5, "ml.c5.xlarge": 0.6}, max_run_s=7200)


def shown_cost(job):
    """Return the first line of the error that replaces the question, since there is no terminal to ask on."""
    with pytest.raises(SubmitError) as caught:
        confirm_cost(job)
    return str(caught.value).split("\n")[0]


def test_all_hosts_are_paid_until_the_time_limit():
    """A group's price overrides that of its instance type, and the sentence shows the calculation."""
    assert shown_cost(JOB) == (
        "The job can cost $7.00 (2 x ml.g5.xlarge at $1.50 + 1 x ml.c5.xlarge at $0.50 an hour, for 2 h; without "
        "storage and transfer)."
    )


@pytest.mark.parametrize(
    ("changes", "amount"),
    [
        ({"request": {"ResourceConfig": {"KeepAlivePeriodInSeconds": 3600}}}, "$10.50"),
        ({"tune": Tune("loss", {}, "minimize", max_jobs=20)}, "$140.00"),
    ],
)
def test_what_makes_a_job_dearer_counts(changes, amount):
    """Keeping hosts alive and running the jobs of a tuning job raise the cost."""
    assert f"can cost {amount} (" in shown_cost(replace(JOB, **changes))


def test_spot_capacity_is_said_to_be_cheaper():
    """The amount assumes on-demand prices and no spot discount."""
    assert shown_cost(replace(JOB, spot=Spot(7200))).endswith("; without spot discount, storage and transfer).")


def test_a_job_that_can_cost_more_is_refused():
    """A cloud job over the limit is a problem that names both amounts; a job at the limit is accepted."""
    (problem,) = cost_problems(replace(JOB, max_cost=6.99))
    assert problem.key == "max_cost"
    assert "max_cost is 6.99, but the job can cost $7.00 (" in problem.text
    assert [*cost_problems(replace(JOB, max_cost=7.0))] == []
    found = check(replace(JOB, max_cost=1.0), "cloud").problems
    assert [problem for problem in found if problem.key == "max_cost"]
    assert not [one for one in check(replace(JOB, max_cost=1.0), "local").problems if one.key == "max_cost"]


def test_a_limit_needs_all_prices_and_the_number_of_jobs():
    """A cost limit is a problem unless all prices and the number of jobs are known."""
    (problem,) = cost_problems(replace(JOB, prices={"data": 0.5}, max_cost=100.0))
    assert "there is no price for ml.g5.xlarge" in problem.text
    assert "is unknown: there is no price for ml.g5.xlarge" in shown_cost(replace(JOB, prices={"data": 0.5}))
    (problem,) = cost_problems(replace(JOB, max_cost=100.0, tune=Tune("loss", {}, "minimize")))
    assert "tune.max_jobs, the number of training jobs, is missing" in problem.text
    chosen = replace(JOB, max_cost=100.0, request={"ResourceConfig": {"InstancePreferences": []}})
    (problem,) = cost_problems(chosen)
    assert "the service chooses the hosts" in problem.text
    assert "is unknown: the service chooses the hosts" in shown_cost(chosen)


class Interrupted(io.StringIO):
    """A terminal at which the user presses Ctrl-C instead of answering."""

    def isatty(self):
        return True

    def readline(self, size=-1, /):
        del size
        raise KeyboardInterrupt


def test_who_interrupts_the_question_learns_that_nothing_was_sent(monkeypatch, capsys):
    """Ctrl-C at the question prints that nothing was sent, below the ^C that the terminal shows."""
    monkeypatch.setattr(sys, "stdin", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        confirm_cost(JOB)
    assert capsys.readouterr().err.endswith("Submit it? [y/N] \nNothing was sent.\n")
