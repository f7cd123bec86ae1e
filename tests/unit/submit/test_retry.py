"""Retrying a submission when capacity is lacking."""

import itertools

import pytest
from botocore.exceptions import ClientError

from lightning_sm.submit.job_file import Retries
from lightning_sm.submit.retry import pause_after, submit_until_capacity

NO_CAPACITY = {
    "TrainingJobStatus": "Failed",
    "FailureReason": "CapacityError: Unable to provision requested ML compute capacity. Please retry.",
}
BROKEN = {"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: RuntimeError: nan"}
DONE = {"TrainingJobStatus": "Completed"}
RETRIES = Retries(max_tries=3, first_pause_s=10, max_pause_s=15)


def refusal(code, message="said the service"):
    """Return a refusal by the service."""
    return ClientError({"Error": {"Code": code, "Message": message}}, "CreateTrainingJob")


def over_quota(quota, wanted):
    """Return the service's refusal of hosts beyond the account's quota."""
    text = (
        f"The account-level service limit 'ml.g5.xlarge for training job usage' is {quota} Instances, with current "
        f"utilization of {quota} Instances and a request delta of {wanted} Instances. Please use AWS Service Quotas."
    )
    return refusal("ResourceLimitExceeded", text)


class Service:
    """A service that accepts, refuses and ends jobs as the given story says."""

    def __init__(self, *story):
        self.story = list(story)
        self.names = []
        self.pauses = []

    def submit(self):
        """Accept a job, or raise the story's next refusal."""
        self.names.append(f"job-{len(self.names)}")
        if isinstance(self.story[0], ClientError):
            raise self.story.pop(0)
        return self.names[-1]

    def watch(self, name):
        """Return the end of the job from the story."""
        assert name == self.names[-1]
        return self.story.pop(0)

    def run(self, retries=RETRIES, *, waits=True):
        """Submit until there is capacity."""
        return submit_until_capacity(self.submit, self.watch if waits else None, retries, self.pauses.append)


@pytest.mark.parametrize(
    "obstacle", [NO_CAPACITY, *map(refusal, ["ResourceLimitExceeded", "ThrottlingException", "InsufficientCapacity"])]
)
def test_lack_of_capacity_is_tried_again_under_a_new_name(obstacle, caplog):
    """A lack of capacity causes a retry, whether it is reported at submission or as the job's failure."""
    service = Service(obstacle, obstacle, DONE)
    with caplog.at_level("WARNING", "lightning_sm"):
        assert service.run() == DONE
    assert service.names == ["job-0", "job-1", "job-2"]
    assert 5 <= service.pauses[0] <= 10
    assert 7.5 <= service.pauses[1] <= 15
    assert "Try 1 of 3 got no hosts" in caplog.messages[0]


def test_the_last_try_is_the_last():
    """After the last try, the job's end is returned or the refusal is raised."""
    assert Service(*[NO_CAPACITY] * 3).run() == NO_CAPACITY
    service = Service(*[refusal("ResourceLimitExceeded")] * 3)
    with pytest.raises(ClientError):
        service.run()
    assert len(service.pauses) == 2


@pytest.mark.parametrize("ending", [DONE, BROKEN, {"TrainingJobStatus": "Stopped"}])
def test_any_other_end_is_the_end(ending):
    """A job that ended for any other reason is not submitted again."""
    service = Service(ending)
    assert service.run() == ending
    assert service.pauses == []


def test_any_other_refusal_is_raised_at_once():
    """Other refusals are raised at once, because a wrong request stays wrong."""
    service = Service(refusal("ValidationException"))
    with pytest.raises(ClientError, match="ValidationException"):
        service.run()
    assert (service.names, service.pauses) == (["job-0"], [])


def test_a_quota_that_is_too_small_is_no_lack_of_capacity():
    """A job is retried only if it fits into the quota, because it can then wait for other jobs to end."""
    service = Service(over_quota(0, 2))
    with pytest.raises(ClientError, match="is 0 Instances"):
        service.run()
    assert service.pauses == []
    service = Service(over_quota(2, 2), DONE)
    assert service.run() == DONE


def test_without_waiting_the_name_is_all():
    """Without waiting for the job's end, refusals are still retried, and the result is the job's name."""
    service = Service(refusal("ThrottlingException"), None)
    assert service.run(waits=False) == {"TrainingJobName": "job-1"}


def test_pauses_double_up_to_the_longest_and_are_drawn():
    """Pauses are random between half of the maximum and the maximum, so that submitters do not synchronise."""
    retries = Retries(max_tries=9, first_pause_s=4, max_pause_s=20)
    for attempt, longest_s in zip(itertools.count(1), [4, 8, 16, 20, 20], strict=False):
        drawn = {pause_after(attempt, retries) for _ in range(50)}
        assert longest_s / 2 <= min(drawn) < max(drawn) <= longest_s
