"""When the last step of a pass is padded: decided by each rank alone, from what all ranks do alike."""

import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.trainer.states import RunningStage

from lightning_sm.data.ipc.feeder_messages import LoaderPlace
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.data.trainer.last_step import LastStep
from lightning_sm.data.trainer.logged_values import ExactResultMetric
from lightning_sm.errors import DataSettingsError

MODES = ["auto", "exact", "pad"]


@pytest.fixture(autouse=True)
def _group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Run:
    """A run of a Trainer on two ranks, of which this process is one."""

    def __init__(self, setting="auto"):
        self.last_step = LastStep(setting)
        self.state = SimpleNamespace(stage=RunningStage.TRAINING)
        hosts = SimpleNamespace(last_step=self.last_step)
        self.trainer = SimpleNamespace(datamodule=SimpleNamespace(_hosts=hosts), world_size=2, state=self.state)

    def __enter__(self):
        self.last_step.setup(self.trainer, None, "fit")
        return self

    def __exit__(self, *_):
        self.last_step.teardown(self.trainer, None, "fit")

    def step(self, weight=1.0, code=""):
        """A step, whose code may be that of another module."""
        self.last_step.take(weight, is_manual=False)
        self.last_step.on_train_batch_start()
        exec(code, {"__name__": "script", "torch": torch})  # noqa: S102  # the name of the module counts

    def mode(self, stage="train", *, num_samples=11, world_size=2, is_manual=False):
        """What is to be done with the last step."""
        return self.last_step.mode(*loader(stage, num_samples, world_size), is_manual=is_manual)

    def mode_of_held(self, stage="train", *, num_samples=11):
        """What is to be done with a last step that was held back."""
        return self.last_step.mode_of_held(*loader(stage, num_samples))


def loader(stage, num_samples=11, world_size=2):
    """A loader with batches of four."""
    description = LoaderDescription(f"{stage}_dataloader()", "shuffled", num_samples, 4, False, "i", "f", "Numbers")
    limits = {"window_batches": 8, "window_bytes": 1 << 20, "max_batch_bytes": 1 << 20, "timeout_s": 60.0}
    return description, LoaderPlace(f"1/fit/{stage}/0", 0, stage, 0, world_size, seed=0, **limits)


GATHER = "torch.distributed.all_gather([torch.empty({0})], torch.ones({0}))"
INTO = "torch.distributed.all_gather_into_tensor(torch.empty(2), input_tensor=torch.ones(2))"
SINGLE = INTO.replace("into_tensor", "single")
OF_LIGHTNING = "import torch.distributed.nn.functional as nn; nn.all_gather(torch.ones(2))"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "code",
    [GATHER.format(2), INTO, OF_LIGHTNING, *([SINGLE] if hasattr(torch.distributed, "all_gather_single") else [])],
)
def test_a_stage_is_padded_once_its_code_gathers(code, caplog):
    """Until its first step has run, its last one waits; each stage is on its own, and a line says why."""
    caplog.set_level(logging.INFO)
    with Run() as run:
        assert run.mode() == "hold"
        run.step(code=code)
        assert run.mode_of_held() == run.mode() == run.mode() == "pad"
        (line,) = caplog.messages
        assert line.startswith("train_dataloader(): in the last step, samples repeat so that all 2 ranks have equally")
        run.state.stage = RunningStage.SANITY_CHECKING
        assert run.mode("val") == "hold"
        run.step()
        assert run.mode_of_held("val") == "exact"
        run.state.stage = RunningStage.VALIDATING
        assert run.mode("val") == "exact"
    with run:
        assert run.mode() == "hold"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("module", "code"),
    [
        pytest.param("torchmetrics.utilities.distributed", GATHER.format(2), id="it exchanges the sizes"),
        pytest.param("torch.distributed.fsdp._flat_param", INTO, id="parameters"),
        pytest.param("script", "torch.distributed.all_gather([torch.empty(())], torch.ones(()))", id="scalars"),
    ],
)
def test_what_libraries_gather_and_scalars_do_not_count(module, code):
    """Their sizes do not depend on the batch."""
    with Run() as run:
        run.step(code=f"__name__ = {module!r}\n{code}")
        assert run.mode_of_held() == "exact"


def test_a_gather_that_not_all_ranks_notice_does_not_count(monkeypatch):
    """Ranks outside of the group would not pad, and samples would be lost."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2 if group is None else 1)
    with Run() as run:
        run.step(code=GATHER.format(2).replace("))", "), torch.distributed.group.WORLD)"))
        assert run.mode_of_held() == "exact"


def test_the_first_step_of_a_stage_is_padded(caplog):
    """Nothing is known of a pass with one step: a gather in it would fail."""
    caplog.set_level(logging.INFO)
    with Run() as run:
        assert (run.mode(num_samples=7), run.mode_of_held(num_samples=7)) == ("hold", "pad")
        assert "because it is the first step of this stage, whose code may gather tensors" in caplog.text
        run.step()
        assert run.mode(num_samples=7) == "exact"


@pytest.mark.parametrize("num_samples", [8, 9, 10, 16])
def test_nothing_is_said_where_nothing_is_padded(num_samples, caplog):
    """All ranks have equally many samples, or repeat one: the batches have equal sizes anyway."""
    caplog.set_level(logging.INFO)
    with Run() as run:
        run.step(code=GATHER.format(2))
        assert run.mode(num_samples=num_samples) == "pad"
        assert not caplog.messages


@pytest.mark.parametrize("setting", MODES)
def test_the_setting_decides(setting):
    """Where it does not leave it to the code, it holds from the first pass on; a single rank has nothing to decide."""
    with Run(setting) as run:
        assert run.mode() == {"auto": "hold"}.get(setting, setting)
        assert run.mode(world_size=1) == "exact"
        run.step(code=GATHER.format(2))
        assert run.mode() == {"auto": "pad"}.get(setting, setting)


def test_loops_of_the_user_wait_each_time():
    """Each may gather, also where the steps of the stage do not."""
    with Run() as run:
        run.step()
        assert (run.mode(), run.mode(is_manual=True), run.mode_of_held()) == ("exact", "hold", "exact")


def test_shapes_are_compared_once_the_ranks_had_different_numbers_of_samples(monkeypatch):
    """From the uneven step to the end of the epoch; the error names two ranks and what to do."""
    compared = []

    def all_gather_object(shapes, shape, group):
        compared.append(shape)
        shapes[0] = shape

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    with Run("exact") as run:
        run.step(code=GATHER.format(2))
        assert not compared
        run.step(1.2, code=GATHER.format(3))
        run.last_step.on_train_epoch_end()
        run.step(code=GATHER.format(4))
        assert compared == [(3,), (4,)]
        run.last_step.on_train_epoch_start()
        run.step(code=GATHER.format(2))
        assert len(compared) == 2
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
        with pytest.raises(
            DataSettingsError, match=r"\(5,\) from rank 0 of its group, but None from rank 1.*tail=exact"
        ):
            run.step(1.2, code=GATHER.format(5))


def test_weights_hold_for_the_step_alone():
    """From the batch's start to the next one's, or the end of the epoch; several loaders must end together."""
    with Run() as run:
        for weight in (1.5, 1.0, 0.0):
            run.step(weight)
            assert ExactResultMetric.weight == weight
        run.last_step.on_train_epoch_end()
        assert ExactResultMetric.weight == 1.0
        run.last_step.take(1.0, is_manual=False)
        run.step(1.5)
        assert ExactResultMetric.weight == 1.0
        run.last_step.take(1.5, is_manual=True)
        run.last_step.on_train_batch_start()
        assert ExactResultMetric.weight == 1.0
        run.last_step.take(1.5, is_manual=False)
        run.step(1.5)
        assert ExactResultMetric.weight == 1.5
    assert ExactResultMetric.weight == 1.0


@pytest.mark.parametrize("code", ["", GATHER.format(2)])
def test_a_resumed_training_knows_whether_it_gathers(code):
    """Right before the last step of an epoch as well, which is that of the run that was interrupted."""
    checkpoint = {}
    with Run() as run:
        run.step(code=code)
        expected = run.mode()
        run.last_step.on_save_checkpoint(run.trainer, None, checkpoint)
    with Run() as run:
        run.last_step.on_load_checkpoint(run.trainer, None, checkpoint)
        assert run.mode() == expected
        assert run.mode("val") == expected  # the stage that runs decides, here the training
    with Run() as run:
        run.last_step.on_load_checkpoint(run.trainer, None, {})
        assert run.mode() == "hold"


def test_nothing_is_replaced_outside_of_a_run_or_for_another_datamodule():
    """Also after an exception; a Trainer that is pickled takes no run along."""
    gather = torch.distributed.all_gather
    with Run() as run:
        assert torch.distributed.all_gather is not gather
        assert pickle.loads(pickle.dumps(run.last_step))._stage == ""  # noqa: S301
        run.last_step.on_exception(run.trainer, None, ValueError())
        assert torch.distributed.all_gather is gather
        run.trainer.datamodule = None
        run.last_step.setup(run.trainer, None, "fit")
        assert torch.distributed.all_gather is gather
