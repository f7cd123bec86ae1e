"""Lightning's own strategies on two hosts: interrupted, resumed, exported, with the weights that DDP comes to."""

import re
import subprocess
import sys

import pytest
import torch

from app.transformer import TransformerLanguageModel
from tests.integration.hosts import REPOSITORY

pytestmark = pytest.mark.processes

TIMEOUT_S = 240
SHAPE = {"width": 32, "num_blocks": 2, "num_heads": 2}
# Of two ranks with 4 windows each, or of one with 8: the same windows in each step.
ROWS_PER_STEP = 8
MODEL_PARALLEL = "ModelParallelStrategy"
FSDP = "tests.fakes.fsdp_on_cpu.FSDPOnCPU"


def run_job(folder, devices, batch_size, *strategy):
    """Train the language model on two hosts, interrupted on the way; returns all lines."""
    command = [
        *(
            sys.executable,
            "-m",
            "lightning_sm",
            "local",
            "--group",
            "trainer=2",
            "--fault",
            "interrupt@step=20,skew=0.2",
        ),
        *("--base-dir", folder / "jobs", "--checkpoints", folder / "checkpoints"),
        *("--env", "OMP_NUM_THREADS=1", "--env", f"PYTHONPATH={REPOSITORY}", "--"),
        *("app/train_text.py", "fit", "--config", "app/configs/transformer.yaml", f"--trainer.devices={devices}"),
        *("--trainer.max_epochs=1", "--trainer.limit_train_batches=400", "--trainer.limit_val_batches=2"),
        *("--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_model_summary=false"),
        *("--data.context=32", f"--data.batch_size={batch_size}"),
        *(f"--model.{name}={value}" for name, value in SHAPE.items()),
        *("--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.momentum=0.9"),
        *strategy,
    ]
    ended = subprocess.run(
        list(map(str, command)), cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return output


def plain_weights(folder):
    """The exported state_dict of the only model directory that has one."""
    (path,) = folder.glob("jobs/*/algo-*/model/state_dict.pt")
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The folder of a job with DDP, and what it printed."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, run_job(folder, 1, ROWS_PER_STEP // 2, "--trainer.strategy=ddp")


def check_interruption(folder, output):
    """Both hosts left at one step, which the second attempt went on from."""
    codes = re.findall(r"^ *(\d) *algo-\d+ +\S+ +trainer +(\d+) ", output, re.MULTILINE)
    assert sorted(codes) == [("1", "143"), ("1", "143"), ("2", "0"), ("2", "0")], output
    (checkpoint,) = (folder / "checkpoints").glob("interrupted-epoch=0-step=*.ckpt")
    assert f"Resuming from {checkpoint}, the latest valid checkpoint of the job." in output
    steps = {int(step) for step in re.findall(r"Interrupted: step (\d+) is saved in", output)}
    assert steps == {int(re.search(r"step=(\d+)", checkpoint.name)[1])}
    return checkpoint


def test_ddp(ddp):
    """One file at one step, with which the job goes on; the exported weights are those of the model."""
    folder, output = ddp
    assert check_interruption(folder, output).is_file()
    TransformerLanguageModel(256, 32, **SHAPE).load_state_dict(plain_weights(folder))


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("devices", "batch_size", "strategy", "settings"),
    [
        pytest.param(1, 4, MODEL_PARALLEL, {"data_parallel_size": 2, "tensor_parallel_size": 1}, id="FSDP2"),
        pytest.param(1, 8, MODEL_PARALLEL, {"data_parallel_size": 1, "tensor_parallel_size": 2}, id="tensor parallel"),
        pytest.param(2, 4, MODEL_PARALLEL, {"data_parallel_size": 2, "tensor_parallel_size": 2}, id="2-D"),
        pytest.param(1, 4, FSDP, {"state_dict_type": "sharded"}, id="FSDP, sharded"),
        pytest.param(1, 4, FSDP, {"state_dict_type": "full"}, id="FSDP, one file"),
        pytest.param(
            2,
            2,
            FSDP,
            {"state_dict_type": "sharded", "sharding_strategy": "HYBRID_SHARD", "device_mesh": [2, 2]},
            id="FSDP, hybrid",
        ),
    ],
)
def test_a_sharded_model(tmp_path, ddp, devices, batch_size, strategy, settings):
    """Interrupted and resumed from shards of all ranks, it exports the weights of DDP as one plain state_dict."""
    arguments = [f"--trainer.strategy={strategy}"]
    arguments += [f"--trainer.strategy.{name}={value}" for name, value in settings.items()]
    output = run_job(tmp_path, devices, batch_size, *arguments)
    checkpoint = check_interruption(tmp_path, output)
    if settings.get("state_dict_type") == "full":
        assert checkpoint.is_file()
    else:
        shards = {f"__{rank}_0.distcp" for rank in range(2 * devices)}
        written = {path.name for path in checkpoint.iterdir()}
        assert written - shards == {".metadata", "meta.pt"}
        # A rank may have nothing that another one has not: replicas of a hybrid share what they write.
        assert "__0_0.distcp" in written
        assert strategy == FSDP or shards <= written
    expected = plain_weights(ddp[0])
    weights = plain_weights(tmp_path)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
