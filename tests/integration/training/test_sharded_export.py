"""Two hosts without a shared folder export a sharded model, with each shard once."""

import os

import pytest
import torch

from tests.exported_model import exported_weights
from tests.integration.hosts import REPOSITORY, run_together, script
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder that contains the folders "0" and "1" of the two hosts."""
    folder = tmp_path_factory.mktemp("export")
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = run_together({str(rank): (script("export_shards.py", str(rank), str(folder)), env) for rank in range(2)})
    assert [one.code for one in ended.values()] == [0, 0]
    return folder


@pytest.mark.parametrize(("model", "added"), [("best", 0), ("current", 1)])
def test_each_host_exports_its_shards(exported, model, added):
    """The model directories of both hosts, merged, are a complete checkpoint."""
    expected = {name: value + added for name, value in torch.load(exported / "0" / "expected.pt").items()}
    names = [sorted(path.name for path in (exported / rank / f"model-{model}").iterdir()) for rank in "01"]
    assert names == [["complete", "model.ckpt"], ["model.ckpt"]]
    shards = [{path.name for path in (exported / rank / f"model-{model}" / "model.ckpt").iterdir()} for rank in "01"]
    assert shards == [{".metadata", "meta.pt", "__0_0.distcp"}, {"__1_0.distcp"}]
    weights = exported_weights(exported / rank / f"model-{model}" for rank in "01")
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
