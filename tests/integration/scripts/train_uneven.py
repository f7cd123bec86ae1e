"""Trains, tests and predicts on ranks with different numbers of samples; every rank writes what it saw to a file."""

import json
import logging
import os
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_sm import RemoteDataModule
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.errors import DataSettingsError

BATCH_SIZE = 4
RANKS = int(os.environ.get("RANKS", "0"))


class Volumes(Dataset):
    """Volumes of different sizes."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((3 + index,), float(index))


class Data(LightningDataModule):
    """Two steps, and one more that does not divide evenly among the ranks."""

    def __init__(self, num_ranks=RANKS):
        super().__init__()
        self.num_ranks = num_ranks

    def numbers(self):
        return DataLoader(torch.arange(1.0, 2 + (2 * BATCH_SIZE + 1) * self.num_ranks), batch_size=BATCH_SIZE)

    def val_dataloader(self):
        return [DataLoader(Volumes(2 * self.num_ranks + 1), batch_size=1), self.numbers()]

    train_dataloader = test_dataloader = predict_dataloader = numbers


class Model(LightningModule):
    """Notes what it sees; gathers in all stages but the validation."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = {}
        self.logged_in_step = []

    def note(self, stage, batch):
        self.seen.setdefault(stage, []).append(batch.tolist())

    def training_step(self, batch, batch_idx):
        self.note("train", batch)
        gathered = self.all_gather(self.layer(batch[:, None]), sync_grads=True)
        assert gathered.shape == (RANKS, len(batch), 1)
        return gathered.mean()

    def validation_step(self, batch, batch_idx, dataloader_idx):
        if dataloader_idx == 0:
            (volume,) = batch
            assert len(volume) == 3 + volume[0]
            batch = volume[:1]
        self.note(f"val {dataloader_idx}", batch)
        self.log("acc", 1.0, sync_dist=True, batch_size=len(batch))
        for name in ("mean", "sum", "max", "min"):
            value = getattr(batch, name)()
            self.log(name, value, reduce_fx=name, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch))

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx):
        # Lightning logs the values of a step after this hook.
        results = self.trainer._results.metrics(on_step=True)["log"]
        self.logged_in_step.append({name: float(value) for name, value in results.items() if "_step" in name})

    def test_step(self, batch, batch_idx):
        self.note("test", batch)
        gathered = [torch.empty_like(batch) for _ in range(RANKS)]
        torch.distributed.all_gather(gathered, batch)
        self.log("all", torch.cat(gathered).mean(), batch_size=len(batch) * RANKS)

    def predict_step(self, batch, batch_idx):
        self.note("predict", batch)

    def on_predict_epoch_end(self):
        self.all_gather(torch.cat([torch.tensor(batch) for batch in self.seen["predict"]]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Lines(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def main():
    log = Lines()
    logging.getLogger("lightning_sm").addHandler(log)
    logging.getLogger("lightning_sm").setLevel(logging.INFO)
    names = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    settings = {**dict.fromkeys(names, False), "num_sanity_val_steps": 0, "max_epochs": 2, "accelerator": "cpu"}
    gather, trainer, model = torch.distributed.all_gather, Trainer(devices=RANKS, strategy="ddp", **settings), Model()
    data = RemoteDataModule(Data(), os.environ["ADDRESSES"].split(), settings=DataServiceSettings())
    trainer.fit(model, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert torch.distributed.all_gather is gather
    trainer.test(model, datamodule=data, verbose=False)
    error = None
    try:
        trainer.predict(model, datamodule=data, return_predictions=False)
    except DataSettingsError as caught:
        error = str(caught)
    assert torch.distributed.all_gather is gather
    seen = {"seen": model.seen, "metrics": metrics, "steps": model.logged_in_step, "error": error, "lines": log.lines}
    Path(os.environ["SEEN"], f"rank-{model.global_rank}.json").write_text(json.dumps(seen))
    # As the CLI does: a Gloo thread that outlives the interpreter aborts the process.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
