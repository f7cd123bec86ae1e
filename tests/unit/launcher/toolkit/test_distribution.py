"""What ``distribution={...}`` means to this launcher: a number of processes, or an error."""

import logging

import pytest

from lightning_sm.errors import StrategyError, TopologyError
from lightning_sm.job.topology import Topology
from lightning_sm.launcher.toolkit.distribution import exported_variables, processes_per_host
from tests.fakes.job_folder import make_job

GROUPS = {"gpu": ["algo-1", "algo-2"], "data": ["algo-3"]}


def processes(hyperparameters, groups=None, **facts):
    """The number of processes on each host that a job with these hyperparameters asks for."""
    job = make_job(groups or {"homogeneousCluster": ["algo-1", "algo-2"]}, hyperparameters=hyperparameters, **facts)
    return processes_per_host(job, Topology.from_job(job))


def test_a_job_without_distribution_says_nothing(caplog):
    """Without distribution, the launcher sets no number of processes and logs nothing."""
    caplog.set_level(logging.INFO, "lightning_sm")
    assert processes({"lr": "0.1", "sagemaker_program": "train.py"}) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "starter"),
    [
        ("sagemaker_torch_distributed_enabled", "torchrun"),
        ("sagemaker_mpi_enabled", "mpirun"),
        ("sagemaker_pytorch_ddp_enabled", "mpirun"),
    ],
)
@pytest.mark.parametrize("value", ["true", "True"])
def test_launchers_of_other_images_are_needless(caplog, name, starter, value):
    """The launcher starts one rank per GPU itself and logs it once, whichever SDK class wrote the value."""
    caplog.set_level(logging.INFO, "lightning_sm")
    assert processes({name: value}, num_gpus=4) == 4
    assert [record.getMessage() for record in caplog.records] == [
        f"lightning-sm: distribution={{...}} asks for {starter}. This launcher starts the same ranks itself: 4 on each "
        "trainer host."
    ]
    assert processes({name: value}) == 1
    assert processes({name: value}, num_gpus=4, devices=2) == 2


def test_a_data_host_has_no_ranks(caplog):
    """A data host gets neither a number of ranks nor a log line about them."""
    caplog.set_level(logging.INFO, "lightning_sm")
    asked = {"sagemaker_torch_distributed_enabled": "true"}
    assert processes(asked, groups=GROUPS, current_host="algo-3") is None
    assert caplog.text == ""


def test_a_disabled_distribution_is_none(caplog):
    """A disabled distribution is ignored."""
    caplog.set_level(logging.INFO, "lightning_sm")
    assert processes({"sagemaker_mpi_enabled": "false", "mp_parameters": "{}"}) is None
    assert caplog.text == ""


def test_the_number_of_processes_is_taken():
    """The SDK's processes_per_host is the number of devices."""
    asked = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "4"}
    assert processes(asked) == 4
    assert processes(asked, devices=4) == 4


def test_variables_of_mpirun_are_set_for_the_script(caplog):
    """Trainer hosts set the variables of -x NAME=value and AWS's --NCCL_DEBUG, and log their names only."""
    caplog.set_level(logging.INFO, "lightning_sm")
    hyperparameters = {
        "sagemaker_mpi_custom_mpi_options": '"-x HF_TOKEN=S3CR3T=1 --mca btl self -x PATH -x EMPTY="',
        "sagemaker_distributed_dataparallel_custom_mpi_options": "--NCCL_DEBUG WARN",
    }
    job = make_job(GROUPS, hyperparameters=hyperparameters)
    expected = {"HF_TOKEN": "S3CR3T=1", "EMPTY": "", "NCCL_DEBUG": "WARN"}
    assert exported_variables(job, Topology.from_job(job)) == expected
    assert "setting HF_TOKEN, EMPTY, NCCL_DEBUG from custom_mpi_options" in caplog.text
    assert "S3CR3T" not in caplog.text
    data = make_job(GROUPS, hyperparameters=hyperparameters, current_host="algo-3")
    assert exported_variables(data, Topology.from_job(data)) == {}


@pytest.mark.parametrize("value", ["true", "True"])
def test_smdistributed_dataparallel_is_left_to_the_script(caplog, value):
    """The ranks are the same as for mpirun; the strategy decides whether they use SMDDP."""
    caplog.set_level(logging.INFO, "lightning_sm")
    assert processes({"sagemaker_distributed_dataparallel_enabled": value}, num_gpus=8) == 8
    assert "asks for smdistributed.dataparallel or pytorchddp. This launcher starts the same ranks" in caplog.text


@pytest.mark.parametrize(
    ("hyperparameters", "facts", "said"),
    [
        (
            {"sagemaker_mpi_num_of_processes_per_host": "4"},
            {"devices": 2},
            ["sagemaker_mpi_num_of_processes_per_host=4", "LIGHTNING_SM_DEVICES is 2"],
        ),
        ({"sagemaker_mpi_num_of_processes_per_host": '"many"'}, {}, ["'many'", "whole number"]),
        ({"sagemaker_mpi_num_of_processes_per_host": "0"}, {}, ["is 0", "whole number"]),
        ({"sagemaker_mpi_num_of_processes_per_host": "true"}, {}, ["is True", "whole number"]),
        ({"sagemaker_distribution_instance_groups": "gpu"}, {"groups": GROUPS}, ["'gpu'", "list of group names"]),
        (
            {"sagemaker_distribution_instance_groups": '["data"]'},
            {"groups": GROUPS},
            ["names the instance groups ['data']", "training groups are ['gpu']", "data groups ['data']", "algo-3"],
        ),
        (
            {"sagemaker_distribution_instance_groups": '["gpu"]'},
            {"groups": {"gpu": ["algo-1"], "more": ["algo-2"]}},
            ["['gpu']", "['gpu', 'more']", "LIGHTNING_SM_DATA_GROUPS"],
        ),
    ],
)
def test_what_contradicts_the_job_is_an_error(hyperparameters, facts, said):
    """The error contains both values and the remedy."""
    with pytest.raises(TopologyError) as error:
        processes(hyperparameters, **facts)
    assert [part for part in said if part not in str(error.value)] == []


def test_smdistributed_modelparallel_is_a_strategy_and_its_ranks_are_those_of_mpi(caplog):
    """The log names the strategy and its options, and there is one rank per GPU, as for mpirun."""
    caplog.set_level(logging.INFO, "lightning_sm")
    asked = {"mp_parameters": '{"partitions": 2, "ddp": true}'}
    assert processes(asked, num_gpus=4) == 4
    (record,) = caplog.records
    assert "smdistributed.modelparallel (partitions=2, ddp=True)" in record.getMessage()
    assert "strategy=pipeline with pipeline_parallel_size=2, data_parallel_size=auto" in record.getMessage()
    mpi = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2"}
    assert processes({**asked, **mpi}, num_gpus=8) == 2


def test_ranks_that_are_no_replicas_are_an_error_before_the_script_starts():
    """Trainer hosts refuse ranks that do not form whole replicas; data hosts have no ranks."""
    asked = {"mp_parameters": '{"partitions": 3}'}
    with pytest.raises(StrategyError, match=r"partitions=3.*number of training processes is 2"):
        processes(asked)
    assert processes(asked, groups=GROUPS, current_host="algo-3") is None


@pytest.mark.parametrize("text", ['["gpu"]', "['gpu']"])
def test_groups_that_train_may_be_named(text):
    """Training groups can be given by a framework estimator, or by a generic one, which writes Python's notation."""
    assert processes({"sagemaker_distribution_instance_groups": text}, GROUPS) is None
