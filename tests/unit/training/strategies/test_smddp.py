"""Where SMDDP can be used, and how the strategy is chosen."""

import sys
from types import ModuleType

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy

from lightning_sm import SMDDPStrategy
from lightning_sm.training.strategies.smddp import obstacle_to_smddp
from tests.fakes.job_folder import make_job

LIBRARY = "smdistributed.dataparallel.torch.torch_smddp"
GROUPS = {"trainer": ["algo-1", "algo-2"], "data": ["algo-3"]}
TYPES = {"trainer": "ml.p4d.24xlarge", "data": "ml.c5.xlarge"}


@pytest.fixture
def library(monkeypatch):
    """Make the library available, as in an image that contains it."""
    monkeypatch.setitem(sys.modules, LIBRARY, ModuleType(LIBRARY))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("type_", ["ml.p4d.24xlarge", "ml.p4de.24xlarge", None])
def test_nothing_is_in_the_way_on_hosts_that_it_is_made_for(type_):
    """There is no obstacle on supported hosts; data hosts may have any type, and an unknown type is accepted."""
    assert obstacle_to_smddp(make_job(GROUPS, instance_types={**TYPES, "trainer": type_}), 2) is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("job", "num_nodes", "said"),
    [
        (None, 1, ["in SageMaker jobs only"]),
        (
            make_job(GROUPS, instance_types={**TYPES, "trainer": "ml.p5.48xlarge"}),
            2,
            ["ml.p4d.24xlarge and ml.p4de.24xlarge", "are of type ml.p5.48xlarge (resourceconfig.json)"],
        ),
        (make_job(GROUPS, instance_types={**TYPES, "trainer": "local_gpu"}), 2, ["of type local_gpu"]),
        (make_job({"one": ["algo-1"]}, instance_types={"one": "ml.p4d.24xlarge"}), 1, ["at least two trainer hosts"]),
    ],
    ids=["a laptop", "another instance type", "local mode", "one host"],
)
def test_what_is_in_the_way_is_named(job, num_nodes, said):
    """The obstacle is described with the values and their source."""
    obstacle = obstacle_to_smddp(job, num_nodes)
    assert [part for part in said if part not in obstacle] == []


def test_an_image_without_the_library_is_told_for_which_torch_there_is_one():
    """The obstacle names the library's torch and this one, as a library for another torch cannot be imported either."""
    obstacle = obstacle_to_smddp(make_job(GROUPS, instance_types=TYPES), 2)
    assert "No module named 'smdistributed'" in obstacle
    assert (
        f"built for PyTorch 2.4.1, but this is PyTorch {torch.__version__}. No release is known for PyTorch 2.6"
        in obstacle
    )


def test_reduce_leaves_alone_what_is_no_tensor_and_what_has_no_peers():
    """As in Lightning's strategies, reduce returns values unchanged if they are not tensors or there is no group."""
    strategy = SMDDPStrategy()
    assert strategy.reduce("text") == "text"
    assert strategy.reduce(torch.tensor(3.0)).item() == 3
    assert (strategy.process_group_backend, isinstance(strategy, DDPStrategy)) == ("smddp", True)
