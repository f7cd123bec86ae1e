"""Mapping a job's ``smdistributed.modelparallel`` parameters to a strategy."""

import json

import pytest

from lightning_sm.errors import StrategyError
from lightning_sm.job.model_parallel import requested_model_parallelism
from tests.fakes.sdk_hyperparameters import sdk_v2_framework, sdk_v2_generic, sdk_v3

# The parameters of a user's estimator, and the example in the SDK's documentation.
SEED = {"partitions": 1, "placement_strategy": "spread", "pipeline": "interleaved", "optimize": "speed", "ddp": True}
EXAMPLE = {**SEED, "partitions": 2, "microbatches": 4}
DEFAULTS = {
    "pipeline_parallel_size": 4,
    "data_parallel_size": 1,
    "num_microbatches": 1,
    "placement": "cluster",
}


def requested(parameters):
    """Return the strategy that a job with these parameters requests."""
    return requested_model_parallelism({"mp_parameters": json.dumps(parameters)})


@pytest.mark.parametrize("hyperparameters", [{}, {"lr": "0.1"}, {"mp_parameters": "{}"}, {"mp_parameters": "null"}])
def test_a_job_without_parameters_asks_for_nothing(hyperparameters):
    """No strategy is requested unless modelparallel is enabled, because the SDK then sends no parameters."""
    assert requested_model_parallelism(hyperparameters) is None


@pytest.mark.parametrize("route", [sdk_v2_generic, sdk_v2_framework, sdk_v3])
def test_the_options_are_those_of_the_example_in_the_sdk(route):
    """The SDK's example yields the same options, whichever SDK class wrote the parameters."""
    found = requested_model_parallelism(route({"mp_parameters": EXAMPLE}))
    assert found.strategy == "pipeline"
    assert found.options == {
        "pipeline_parallel_size": 2,
        "data_parallel_size": "auto",
        "num_microbatches": 4,
        "placement": "spread",
    }


@pytest.mark.parametrize("name", ["partitions", "pipeline_parallel_degree"])
def test_what_is_not_stated_has_the_defaults_of_the_library(name):
    """The library's defaults apply: one microbatch, one replica, neighbouring ranks, balanced by memory."""
    found = requested({name: 4})
    assert (found.strategy, found.options) == ("pipeline", DEFAULTS)


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({"pipeline": "simple"}, {}),
        ({"placement_strategy": "PDT"}, {"placement": "spread"}),
        ({"placement_strategy": "TPD"}, {"placement": "spread"}),
        ({"placement_strategy": "DTP"}, {"placement": "cluster"}),
        ({"memory_weight": 0.8, "optimize": "speed"}, {}),
        ({"microbatches": 8}, {"num_microbatches": 8}),
        ({"ddp_dist_backend": "nccl"}, {"process_group_backend": "nccl"}),
        ({"auto_partition": True, "horovod": False, "ddp_port": 7, "skip_tracing": True, "contiguous": True}, {}),
    ],
)
def test_each_parameter_becomes_its_option(parameters, options):
    """Each parameter sets its option, and all other options keep their defaults."""
    found = requested({"partitions": 4, **parameters}).options
    assert found == {**DEFAULTS, **options}


@pytest.mark.parametrize("parameters", [SEED, {"tensor_parallel_degree": 1}])
def test_one_partition_is_ddp(parameters):
    """A model that is not split needs no pipeline and uses DDP."""
    found = requested(parameters)
    assert (found.strategy, found.options, str(found)) == ("ddp", {}, "strategy=ddp")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"partitions": 2, "pipeline_parallel_degree": 4}, ["partitions=2", "pipeline_parallel_degree=4"]),
        ({"partitions": 0}, ["partitions=0", "Expected `int` >= 1"]),
        ({"partitions": True}, ["partitions=True", "Expected `int | null`, got `bool`"]),
        ({"partitions": 2, "ddp": "yes"}, ["ddp='yes'", "Expected `bool`"]),
        (
            {"partitions": 2, "pipeline": "_only_forward"},
            ["pipeline='_only_forward'", "Invalid enum value", "$.pipeline"],
        ),
        ({"partitions": 2, "active_microbatches": 2}, ["active_microbatches=2", "of all microbatches"]),
        ({"partitions": 2, "placement_strategy": "near"}, ["placement_strategy='near'", "$.placement_strategy"]),
        ({"shard_optimizer_state": True, "ddp": True}, ["shard_optimizer_state=True", "fsdp"]),
        ({"partitions": 1, "tensor_parallel_degree": 4}, ["tensor_parallel_degree=4", "ModelParallelStrategy"]),
        ({"partitions": 2, "auto_partition": False, "default_partition": 0}, ["auto_partition=False", "split"]),
        ({"partitions": 2, "horovod": True}, ["horovod=True", "ddp"]),
        ({"partitions": 2, "fp16": True}, ["fp16=True", "trainer.precision"]),
        ({"partitions": 2, "offload_activations": True}, ["offload_activations=True", "torch.utils.checkpoint"]),
        (
            {"partitions": 2, "ddp": True, "ddp_dist_backend": "smddp"},
            ["ddp_dist_backend='smddp'", "$.ddp_dist_backend"],
        ),
        ({"sharded_data_parallel_degree": 8}, ["sharded_data_parallel_degree=8", "strategy=fsdp"]),
        ({"hybrid_shard_degree": 8}, ["unknown field `hybrid_shard_degree`", "Known parameters: activation_loading"]),
        ({"partitions": 2, "microbatch": 4}, ["unknown field `microbatch`", "microbatches"]),
        ([2], ["mp_parameters is [2]", "dict"]),
    ],
)
def test_what_no_option_stands_for_is_an_error(parameters, said):
    """Unsupported parameters raise an error that names them, the contradiction and the alternative."""
    with pytest.raises(StrategyError) as error:
        requested(parameters)
    assert [part for part in said if part not in str(error.value)] == []


def test_the_number_of_processes_must_be_that_of_whole_replicas():
    """The number of processes must equal the partitions, or a multiple of them if ddp is set."""
    requested({"partitions": 4}).check_world_size(4)
    requested({"partitions": 4, "ddp": True}).check_world_size(8)
    with pytest.raises(StrategyError, match=r"partitions=4, ddp=True.*4 processes.*processes is 6"):
        requested({"partitions": 4, "ddp": True}).check_world_size(6)
    with pytest.raises(StrategyError, match=r"partitions=4\).*processes is 8.*ddp set to true"):
        requested({"partitions": 4}).check_world_size(8)
