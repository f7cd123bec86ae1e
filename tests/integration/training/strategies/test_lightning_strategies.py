"""Lightning's strategies on two hosts: interrupted, resumed and exported, with the same weights as DDP."""

import re
import subprocess
import sys

import pytest
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from app.transformer import TransformerLanguageModel
from lightning_sm.errors import StrategyError
from tests.exported_model import exported_weights
from tests.integration.hosts import REPOSITORY
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

TIMEOUT_S = 480
SHAPE = {"width": 32, "num_blocks": 2, "num_heads": 2}
# Two ranks with 4 windows each, or one with 8, train on the same windows in each step.
ROWS_PER_STEP = 8


def script_arguments(batch_size):
    """Arguments of app/train_text.py: a small model, and plain SGD, with which results differ only by rounding."""
    return [
        *("fit", "--config", str(REPOSITORY / "app/configs/transformer.yaml")),
        *("--trainer.max_epochs=1", "--trainer.limit_train_batches=60", "--trainer.limit_val_batches=2"),
        *("--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_model_summary=false"),
        *("--data.context=32", f"--data.batch_size={batch_size}"),
        *(f"--model.{name}={value}" for name, value in SHAPE.items()),
        *("--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.momentum=0.9"),
    ]


def model_parallel(data, tensor):
    """The flags of ModelParallelStrategy."""
    sizes = [f"--trainer.strategy.data_parallel_size={data}", f"--trainer.strategy.tensor_parallel_size={tensor}"]
    # Too high to clip anything, but all norms are added up.
    return ["--trainer.strategy=ModelParallelStrategy", *sizes, "--trainer.gradient_clip_val=1000"]


def fsdp(**settings):
    """The flags of FSDP on CPUs."""
    given = [f"--trainer.strategy.{name}={value}" for name, value in settings.items()]
    return ["--trainer.strategy=tests.fakes.fsdp_on_cpu.FSDPOnCPU", *given]


def run_job(folder, devices, batch_size, *strategy):
    """Train the language model on two hosts with an interruption, and return the output."""
    command = [
        *(sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=2", "--devices", str(devices)),
        *("--fault", "interrupt@step=20,skew=0.2"),
        *("--base-dir", str(folder / "jobs"), "--checkpoints", str(folder / "checkpoints")),
        *("--env", "OMP_NUM_THREADS=1", "--env", f"PYTHONPATH={python_path(REPOSITORY)}"),
        *("--", "app/train_text.py", *script_arguments(batch_size), *strategy),
    ]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return output


def plain_weights(folder):
    """The weights of the exported model."""
    return exported_weights(folder.glob("jobs/*/algo-*/model"))


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The folder of a job with DDP, and its output."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, run_job(folder, 1, ROWS_PER_STEP // 2, "--trainer.strategy=ddp")


def check_interruption(folder, output):
    """Check that both hosts exited at the same step, from which the second attempt resumed."""
    codes = re.findall(r"^ *(\d) *algo-\d+ +\S+ +trainer +(\d+) ", output, re.MULTILINE)
    assert sorted(codes) == [("1", "143"), ("1", "143"), ("2", "0"), ("2", "0")], output
    (checkpoint,) = (folder / "checkpoints").glob("interrupted-epoch=0-step=*.ckpt")
    assert f"/ml/checkpoints/{checkpoint.name}, the latest valid checkpoint of the job." in output
    steps = {int(step) for step in re.findall(r"Interrupted: step (\d+) is saved in", output)}
    assert steps == {int(re.search(r"step=(\d+)", checkpoint.name)[1])}
    return checkpoint


# make test covers interruptions with training/test_interruptions.py, and exports with test_cli_two_hosts.py.
@pytest.mark.proof
def test_ddp(ddp):
    """A DDP job saves one file at one step, resumes from it, and exports the weights of the model."""
    folder, output = ddp
    assert check_interruption(folder, output).is_file()
    TransformerLanguageModel(256, 32, **SHAPE).load_state_dict(plain_weights(folder))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("devices", "batch_size", "strategy"),
    [
        pytest.param(2, 4, model_parallel(2, 2), id="FSDP2 and tensor parallel"),
        pytest.param(1, 4, fsdp(state_dict_type="sharded"), id="FSDP"),
        pytest.param(
            2,
            2,
            fsdp(
                state_dict_type="full",
                sharding_strategy="HYBRID_SHARD",
                device_mesh=[2, 2],
                auto_wrap_policy=["app.transformer.Block"],
            ),
            id="FSDP, hybrid, one file",
        ),
    ],
)
def test_a_sharded_model(tmp_path, ddp, devices, batch_size, strategy):
    """A model that was resumed from the shards of all ranks is exported with DDP's weights as a plain state_dict."""
    output = run_job(tmp_path, devices, batch_size, *strategy)
    checkpoint = check_interruption(tmp_path, output)
    if "--trainer.strategy.state_dict_type=full" in strategy:
        assert checkpoint.is_file()
    else:
        shards = {f"__{rank}_0.distcp" for rank in range(2 * devices)}
        assert {path.name for path in checkpoint.iterdir()} == {".metadata", "meta.pt", *shards}
    expected = plain_weights(ddp[0])
    weights = plain_weights(tmp_path)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("strategy", "needs"),
    [
        ("fsdp", "requires a GPU accelerator, but received `accelerator='cpu'`"),
        ("deepspeed", "have DeepSpeed installed"),
    ],
)
def test_what_is_missing_is_said_when_the_trainer_is_made(host, strategy, needs):
    """A missing GPU or package fails before training, with Lightning's error."""
    with pytest.raises((ValueError, MisconfigurationException), match=needs):
        host.make("--trainer.accelerator=cpu", f"--trainer.strategy={strategy}")


def test_shards_that_restore_a_wrong_optimizer_are_refused(host):
    """Hybrid FSDP cannot resume from its own shards: an error at the start says so, and names alternatives."""
    strategy = fsdp(state_dict_type="sharded", sharding_strategy="HYBRID_SHARD", device_mesh=[1, 1])
    wrong = r"HYBRID_SHARD restores a wrong optimizer state .* Set state_dict_type=full, or use"
    with pytest.raises(StrategyError, match=wrong):
        host.make("--trainer.accelerator=cpu", *strategy)
