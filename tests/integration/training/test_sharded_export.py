"""Two hosts without a shared folder export a sharded model: all shards once, and the weights as one file."""

import os
import shutil

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.hosts import REPOSITORY, run_together, script
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder with the folders "0" and "1" of both hosts, and what they printed."""
    folder = tmp_path_factory.mktemp("export")
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = run_together({str(rank): (script("export_shards.py", str(rank), str(folder)), env) for rank in range(2)})
    assert [one.code for one in ended.values()] == [0, 0]
    return folder, ended["0"].output + ended["1"].output


@pytest.mark.parametrize(("model", "added"), [("best", 0), ("current", 1), ("lost", 1)])
def test_each_host_exports_its_shards_and_rank_0_the_weights(exported, tmp_path, model, added):
    """The merged model directories are a whole checkpoint, and state_dict.pt has its weights without Lightning."""
    folder, _ = exported
    expected = {name: value + added for name, value in torch.load(folder / "0" / "expected.pt").items()}
    names = [sorted(path.name for path in (folder / rank / f"model-{model}").iterdir()) for rank in "01"]
    assert names == [["complete", "model.ckpt", "state_dict.pt"], ["model.ckpt"]]
    shards = [{path.name for path in (folder / rank / f"model-{model}" / "model.ckpt").iterdir()} for rank in "01"]
    assert shards == [{".metadata", "meta.pt", "__0_0.distcp"}, {"__1_0.distcp"}]
    torch.testing.assert_close(torch.load(folder / "0" / f"model-{model}" / "state_dict.pt"), expected, rtol=0, atol=0)
    for rank in "01":
        shutil.copytree(folder / rank / f"model-{model}" / "model.ckpt", tmp_path / "merged", dirs_exist_ok=True)
    dcp_to_torch_save(tmp_path / "merged", tmp_path / "whole.pt")
    torch.testing.assert_close(torch.load(tmp_path / "whole.pt")["state_dict"], expected, rtol=0, atol=0)


def test_a_lost_shard_is_named(exported):
    """Once, with what is done instead."""
    text = "No host has __1_0.distcp of the best checkpoint best.ckpt: exporting the last step."
    assert exported[1].count(text) == 1
