# The script of train_and_note.py with a model that is sharded over the ranks (FSDP2), and so its checkpoints.
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from train_and_note import Line, Points

from lightning_sm import SageMakerCLI


class Sharded(Line):
    def configure_model(self):
        if not hasattr(self, "is_sharded"):
            self.is_sharded = True
            fully_shard(self.line, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    strategy = {
        "class_path": f"{ModelParallelStrategy.__module__}.ModelParallelStrategy",
        "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1},
    }
    SageMakerCLI(
        Sharded,
        Points,
        seed_everything_default=1,
        trainer_defaults={
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "logger": False,
            "accelerator": "cpu",
            "strategy": strategy,
        },
    )
