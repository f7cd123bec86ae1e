"""Choosing a strategy of lightning_sm: by its name, by its class, or by the SDK's ``distribution``."""

import json
import logging
import sys
from types import ModuleType

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import DDPStrategy

from lightning_sm import PipelineParallelStrategy, SageMakerFabric, SageMakerTrainer, SMDDPStrategy
from lightning_sm.errors import StrategyError
from tests.fakes.job_folder import resource_config
from tests.fakes.small_app import TWO_HOSTS

LIBRARY = "smdistributed.dataparallel.torch.torch_smddp"
ASKED = {"sagemaker_distributed_dataparallel_enabled": "true"}
SPLIT = {
    "mp_parameters": json.dumps({"pipeline_parallel_degree": 2, "microbatches": 8, "placement_strategy": "spread"})
}
# A user's configuration: SMP with one partition.
NOT_SPLIT = {"mp_parameters": json.dumps({"partitions": 1, "placement_strategy": "spread", "ddp": True})}
CPU = ("--trainer.accelerator=cpu", "--trainer.logger=false")


@pytest.fixture
def p4d(host, monkeypatch):
    """A host of a job that supports SMDDP."""
    monkeypatch.setitem(sys.modules, LIBRARY, ModuleType(LIBRARY))
    return configure(host, "ml.p4d.24xlarge")


def configure(host, instance_type, hyperparameters=None):
    """Write the files of a job of two trainer hosts."""
    host.configure(TWO_HOSTS, hyperparameters=hyperparameters or {})
    resources = resource_config(TWO_HOSTS, "algo-1", instance_types={"trainer": instance_type}, interface="lo")
    (host.base_dir / "input/config/resourceconfig.json").write_text(json.dumps(resources))
    return host


def test_the_name_and_the_class_are_the_same_strategy(p4d, tmp_path):
    """The name on the command line and the class in a file, with arguments of DDP, give the same strategy."""
    assert type(p4d.make(*CPU, "--trainer.strategy=smddp").trainer.strategy) is SMDDPStrategy
    config = tmp_path / "config.yaml"
    chosen = {"class_path": "lightning_sm.SMDDPStrategy", "init_args": {"find_unused_parameters": True}}
    config.write_text(json.dumps({"trainer": {"strategy": chosen}}))
    strategy = p4d.make(f"--config={config}", *CPU).trainer.strategy
    assert type(strategy) is SMDDPStrategy
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    assert strategy.process_group_backend == "smddp"


@pytest.mark.usefixtures("p4d")
def test_distribution_chooses_smddp(host, caplog):
    """If the script sets no strategy, ``distribution`` chooses SMDDP, with and without the CLI."""
    configure(host, "ml.p4d.24xlarge", ASKED)
    assert type(host.make(*CPU).trainer.strategy) is SMDDPStrategy
    assert type(SageMakerTrainer(accelerator="cpu", logger=False).strategy) is SMDDPStrategy
    assert "distribution" not in caplog.text


@pytest.mark.usefixtures("p4d")
def test_another_strategy_wins_over_distribution_and_both_are_named(host, caplog):
    """The script's strategy wins and a warning names both: pytorchddp, which needs no library, sends the same."""
    configure(host, "ml.p4d.24xlarge", ASKED)
    said = (
        "asks for smdistributed.dataparallel (or pytorchddp: the SDK sends the same for both), but strategy={} is set"
    )
    assert type(host.make(*CPU, "--trainer.strategy=ddp").trainer.strategy) is DDPStrategy
    assert said.format("ddp") in caplog.text
    trainer = SageMakerTrainer(accelerator="cpu", logger=False, strategy=DDPStrategy(find_unused_parameters=True))
    assert type(trainer.strategy) is DDPStrategy
    assert said.format("DDPStrategy") in caplog.text


def test_distribution_on_other_hosts_trains_without_smddp(host, caplog):
    """Hosts without SMDDP use DDP, as intended for pytorchddp, which the SDK sends alike, and the log says why."""
    caplog.set_level(logging.INFO, "lightning_sm")
    configure(host, "ml.g5.48xlarge", ASKED)
    assert type(host.make(*CPU).trainer.strategy) is DDPStrategy
    assert "Training without it: SMDDP runs on ml.p4d.24xlarge and ml.p4de.24xlarge, but the trainer" in caplog.text


def test_smddp_on_other_hosts_is_an_error_that_names_ddp(host):
    """On hosts without SMDDP, the error is raised when the Trainer is created, before any other rank starts."""
    configure(host, "ml.g5.48xlarge")
    with pytest.raises(StrategyError, match=r"strategy=smddp cannot be used: .* ml\.g5\.48xlarge .* Use strategy=ddp"):
        host.make(*CPU, "--trainer.strategy=smddp")


def options_of(strategy):
    """Return the pipeline's options that ``distribution`` sets."""
    assert type(strategy) is PipelineParallelStrategy
    return strategy._sizes, strategy._num_microbatches, strategy._order


def test_modelparallel_chooses_the_pipeline_with_its_options(host):
    """``distribution`` sets the pipeline's options with and without the CLI, even if the script names the strategy."""
    configure(host, "ml.p3.16xlarge", SPLIT)
    expected = ((2, 1), 8, "spread")
    assert options_of(host.make(*CPU).trainer.strategy) == expected
    assert options_of(host.make(*CPU, "--trainer.strategy=pipeline").trainer.strategy) == expected
    assert options_of(SageMakerTrainer(accelerator="cpu", logger=False).strategy) == expected
    plain = Trainer(strategy="pipeline", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert options_of(plain.strategy) == expected


def test_modelparallel_with_one_partition_is_ddp(host):
    """One partition means DDP, even if the script sets strategy=ddp."""
    configure(host, "ml.p3.16xlarge", NOT_SPLIT)
    assert type(host.make(*CPU).trainer.strategy) is DDPStrategy
    assert type(host.make(*CPU, "--trainer.strategy=ddp").trainer.strategy) is DDPStrategy


@pytest.mark.parametrize(
    ("hyperparameters", "strategy"),
    [
        (SPLIT, "ddp"),
        (NOT_SPLIT, "pipeline"),
        (NOT_SPLIT, "fsdp"),
        (SPLIT, '{"class_path": "lightning_sm.PipelineParallelStrategy"}'),
    ],
)
def test_a_strategy_beside_modelparallel_is_an_error_that_names_both(host, hyperparameters, strategy):
    """A strategy beside modelparallel raises an error that names both, because they set the same things."""
    configure(host, "ml.p3.16xlarge", hyperparameters)
    name = strategy.rpartition(".")[2].rstrip('"}')
    with pytest.raises(StrategyError, match=rf"smdistributed.modelparallel .* but the script has strategy={name}\."):
        host.make(*CPU, f"--trainer.strategy={strategy}")


def test_fabric_refuses_a_split_model(host):
    """SageMakerFabric does not support pipelines, and refuses a split model instead of training without one."""
    configure(host, "ml.p3.16xlarge", SPLIT)
    with pytest.raises(
        StrategyError, match=r"smdistributed.modelparallel .* but SageMakerFabric does not support pipelines"
    ):
        SageMakerFabric(accelerator="cpu")
