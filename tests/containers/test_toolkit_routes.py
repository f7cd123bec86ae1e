"""mpirun and torchrun of AWS's images start the same ranks as our launcher, which needs neither."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.containers import own_code
from tests.containers.emulated_job import submit
from tests.containers.images import build
from tests.containers.local_mode import fit

pytestmark = [pytest.mark.docker, pytest.mark.proof]

_ROUTES = Path(__file__).parent / "routes"
_TORCHRUN = {"torch_distributed": {"enabled": True}}
_MPI = {"mpi": {"enabled": True, "processes_per_host": 2}}
_TWO_HOSTS = [(0, "algo-1", 0, 0, 2), (1, "algo-2", 1, 0, 2)]
_TWO_HOSTS_OF_TWO = [(0, "algo-1", 0, 0, 4), (1, "algo-1", 0, 1, 4), (2, "algo-2", 1, 0, 4), (3, "algo-2", 1, 1, 4)]
_TABLE = own_code.ARGUMENTS["table"]
_TYPE = "ml.c5.xlarge"


@pytest.fixture(scope="module")
def toolkit_image(image):
    """Our image with the entry point of AWS's PyTorch images."""
    return build(_ROUTES / "Dockerfile", "lightning-sm-test/routes", _ROUTES, IMAGE=image)


def _fit(python, folder, image, distribution, hyperparameters=None, **settings):
    """Train the user's code with a ``PyTorch`` estimator."""
    folder.mkdir()
    arguments = {
        "image_uri": image,
        "environment": own_code.ENVIRONMENT,
        "entry_point": own_code.ENTRY_POINT,
        "source_dir": own_code.source_dir(folder),
        "distribution": distribution,
        "hyperparameters": {"trainer.max_epochs": 1, "model.table": _TABLE, **(hyperparameters or {})},
        **settings.pop("hosts", {"instance_type": "local", "instance_count": 2}),
    }
    inputs = {"training": own_code.points(folder).as_uri()}
    return fit(
        python, folder / "job", arguments, inputs, estimator="sagemaker.pytorch.PyTorch", is_offline=True, **settings
    )


def _run_groups(folder, image, groups, channel_groups=None, **hyperparameters):
    """Train the same code in instance groups, with the hyperparameters that the SDK sends for torchrun."""
    folder.mkdir()
    (first, *_) = groups.values()
    asked_for = {"sagemaker_torch_distributed_enabled": True, "sagemaker_instance_type": first["instance_type"]}
    return submit(
        folder / "job",
        {
            "image": image,
            "groups": groups,
            "channels": {"training": {"uri": own_code.points(folder).as_uri(), "groups": channel_groups}},
            "source_dir": own_code.source_dir(folder),
            "script": own_code.ENTRY_POINT,
            "environment": own_code.ENVIRONMENT,
            "hyperparameters": {"trainer.max_epochs": 1, "model.table": _TABLE, **asked_for, **hyperparameters},
        },
    )


def _check(job, places, started_by):
    assert job.has_succeeded, job
    assert own_code.places(job) == places
    for one in own_code.seen(job):
        assert one["met"] == list(range(len(places)))
        assert one["started_by"] == started_by
        assert one["arguments"]["table"] == _TABLE
    assert set(job.model) == own_code.MODEL_FILES


@pytest.mark.sdk2
def test_mpirun_and_torchrun_start_the_ranks_of_our_launcher(toolkit_image, sdk2_python, tmp_path):
    """For ``distribution={...}``, the toolkit starts the same ranks as our entry point would."""
    with ThreadPoolExecutor(2) as pool:
        # mpirun idles for 30 s at its end (sagemaker_training/mpi.py, WorkerRunner.run), so both jobs run in parallel.
        mpirun = pool.submit(_fit, sdk2_python, tmp_path / "mpirun", toolkit_image, _MPI)
        torchrun = pool.submit(_fit, sdk2_python, tmp_path / "torchrun", toolkit_image, _TORCHRUN)
    _check(mpirun.result(), _TWO_HOSTS_OF_TWO, ["mpirun"])
    _check(torchrun.result(), _TWO_HOSTS, ["torchrun"])


# With torch_distributed, the SDK drops the names of the groups (sagemaker 2.257.7, pytorch/estimator.py,
# _pytorch_distribution_configuration), and the toolkit starts a separate torchrun in every group.


def test_torchrun_in_a_data_group_does_no_harm(toolkit_image, tmp_path):
    """A data host serves under a torchrun that the SDK starts by mistake; the trainers have a separate one.

    Only the data host has the channel, so it runs the hook that writes the file.
    """
    groups = {"data": {"instance_type": _TYPE}, "trainer": {"instance_type": _TYPE, "count": 2}}
    job = _run_groups(tmp_path / "job", toolkit_image, groups, ["data"])
    # The toolkit numbers the hosts of a group in the service's order, which is random.
    _check(job, _one_rank_each(job.hosts("trainer")), ["torchrun"])
    served = [name for name in job.artifacts if name.endswith("/made-batches.json")]
    assert [(name.split("/")[1], job.json(name)["started_by"]) for name in served] == [
        (*job.hosts("data"), ["torchrun"])
    ]


def test_torchrun_in_each_of_two_training_groups_is_refused_with_advice_that_helps(toolkit_image, tmp_path):
    """Two training groups with a torchrun each fail instead of training two models; the advised setting joins them."""
    groups = {"one": {"instance_type": _TYPE}, "two": {"instance_type": _TYPE}}
    names = {"sagemaker_distribution_instance_groups": ["one", "two"]}
    with ThreadPoolExecutor(2) as pool:
        apart = pool.submit(_run_groups, tmp_path / "apart", toolkit_image, groups)
        joined = pool.submit(_run_groups, tmp_path / "joined", toolkit_image, groups, **names)
    job = apart.result()
    assert job.returncode == 1, job
    assert own_code.seen(job) == []
    assert "but the job needs world size 2: trainer hosts x local world size = 2 x 1" in job.output
    assert "with the hyperparameter sagemaker_distribution_instance_groups" in job.output
    _check(joined.result(), _one_rank_each(joined.result().hosts("one", "two")), ["torchrun"])


def _one_rank_each(hosts):
    return [(rank, host, rank, 0, len(hosts)) for rank, host in enumerate(hosts)]
