"""What jobs cost."""

from datetime import timedelta

import pytest

from lightning_sm.cloud.cost import bill, shown_bills
from lightning_sm.cloud.hosts import shown_hosts
from lightning_sm.errors import JobConfigError
from lightning_sm.record.prices import Prices
from tests.fakes.aws import NOW, one_host, training_job

PRICES = Prices({"ml.g5.xlarge": 2.0, "ml.c5.xlarge": 0.5}, source="--price")


def shown(*jobs, prices=PRICES):
    """The table and the lines below it."""
    return shown_bills([bill(job, NOW) for job in jobs], prices)


def test_billable_seconds_count_for_every_host():
    """Two hosts at 2.0 and one at 0.5 an hour for half an hour; each group has a row."""
    text = shown(training_job(BillableTimeInSeconds=1800, TrainingTimeInSeconds=1800))
    assert [line.split()[2:] for line in text.splitlines()[2:4]] == [
        ["trainer", "2", "x", "ml.g5.xlarge", "30", "min", "$2.00"],
        ["data", "1", "x", "ml.c5.xlarge", "30", "min", "$0.25"],
    ]
    assert "total: $2.25\n" in text
    assert "spot" not in text
    assert "Estimate" not in text


def test_spot_capacity_is_billed_as_fewer_seconds_at_the_list_price():
    """The saving is the share of the time that was not billed."""
    text = shown(
        training_job(
            ResourceConfig=one_host(),
            EnableManagedSpotTraining=True,
            BillableTimeInSeconds=1080,
            TrainingTimeInSeconds=3600,
        )
    )
    assert "total: $0.60\n" in text
    assert "spot saved 70%, $1.40: 18 min of 1 h were billed" in text


def test_a_warm_pool_is_billed_besides():
    """The hosts that were kept after the job cost as much per hour as during it."""
    pool = {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 900}
    text = shown(
        training_job(
            ResourceConfig=one_host(), BillableTimeInSeconds=3600, TrainingTimeInSeconds=3600, WarmPoolStatus=pool
        )
    )
    assert "warm pool: $0.50" in text
    assert "total: $2.50\n" in text


@pytest.mark.parametrize("is_spot", [False, True])
def test_a_running_job_is_estimated(is_spot):
    """From the start of its training until now; what spot capacity saves is not known yet."""
    job = training_job(status="InProgress", ResourceConfig=one_host(), EnableManagedSpotTraining=is_spot)
    text = shown(job)
    assert "total: about $2.00\n" in text
    assert "Estimate: 1 job has no billable time yet" in text
    assert ("without spot savings" in text) == is_spot


def test_a_job_that_waits_costs_nothing():
    """No host has started."""
    assert "total: about $0.00\n" in shown(training_job(status="InProgress", TrainingStartTime=None))
    assert "nothing is billed yet" in shown()


def test_an_ended_job_without_billable_time_is_counted_to_its_end():
    """Not to this moment."""
    ended = training_job(ResourceConfig=one_host(), TrainingEndTime=NOW - timedelta(minutes=30))
    assert "total: about $1.00\n" in shown(ended)


def test_several_training_jobs_are_added_up():
    """As of a tuning job; prices of a group come before those of an instance type."""
    jobs = [training_job(name, BillableTimeInSeconds=3600, TrainingTimeInSeconds=3600) for name in ("a", "b")]
    assert "total: $8.00\n" in shown(*jobs, prices=Prices({**PRICES.per_hour, "trainer": 1.75}, source="file"))


def test_a_training_plan_is_prepaid():
    """So the amount is said to be what the hosts would cost."""
    plan = "arn:aws:sagemaker:us-east-1:111122223333:training-plan/plan"
    job = training_job(
        ResourceConfig=one_host(TrainingPlanArn=plan), BillableTimeInSeconds=3600, TrainingTimeInSeconds=3600
    )
    assert "The hosts of a training plan are prepaid" in shown(job)


def test_missing_prices_are_named_with_the_option_that_gives_them():
    """None is built in."""
    with pytest.raises(JobConfigError, match=r"--price ml\.g5\.xlarge=PRICE --price ml\.c5\.xlarge=PRICE"):
        shown(training_job(BillableTimeInSeconds=1), prices=Prices())


def test_hosts_that_the_service_has_not_chosen_yet_are_named_as_wanted():
    """A job that waits for one of several instance types; then the one that it has."""
    wanted = [
        {"InstanceType": "ml.g5.xlarge", "InstanceCount": 4},
        {"InstanceType": "ml.g6.xlarge", "InstanceCount": 4},
    ]
    resources = {"VolumeSizeInGB": 30, "InstancePreferences": wanted}
    assert shown_hosts({"ResourceConfig": resources}) == "4 ml.g5.xlarge or ml.g6.xlarge"
    chosen = {"SelectedInstanceType": "ml.g6.xlarge", "SelectedInstanceCount": 4}
    assert shown_hosts({"ResourceConfig": {**resources, **chosen}}) == "4 ml.g6.xlarge"
