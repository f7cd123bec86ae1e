"""Node classification in the style of torch_geometric: NeighborLoader samples subgraphs around seed nodes."""

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from lightning_sm import SageMakerCLI


def add_degree(batch):
    batch.degree = torch.bincount(batch.edge_index[1], minlength=len(batch.x))
    return batch


class PapersData(LightningDataModule):
    def __init__(self, batch_size: int = 4, filter_per_worker: bool = False):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        generator = torch.Generator().manual_seed(0)
        self.data = Data(
            x=torch.rand(64, 3, generator=generator),
            edge_index=torch.randint(0, 64, (2, 400), generator=generator),
            y=torch.arange(64) % 2,
        )
        self.num_classes = 2

    def make_loader(self, nodes, num_neighbors, **options):
        return NeighborLoader(
            self.data,
            num_neighbors,
            nodes,
            transform=add_degree,
            filter_per_worker=self.hparams.filter_per_worker,
            batch_size=self.hparams.batch_size,
            **options,
        )

    def train_dataloader(self):
        return self.make_loader(torch.arange(48), [4, 2], shuffle=True, num_workers=2, persistent_workers=True)

    def val_dataloader(self):
        return self.make_loader(torch.arange(48, 64), [-1])  # all neighbors


class GraphSAGE(LightningModule):
    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.own, self.neighbors = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        self.seen = {"train": [], "val": []}

    def forward(self, x, edge_index):
        mean = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        mean /= torch.bincount(edge_index[1], minlength=len(x)).clamp(min=1)[:, None]
        return self.own(x) + self.neighbors(mean), mean

    def step(self, batch, stage):
        assert type(batch) is Data, type(batch)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        assert batch._orig_edge_index.shape == batch.edge_index.shape
        assert batch._store._parent() is batch
        out, mean = self(batch.x, batch.edge_index)
        seeds = zip(batch.input_id.tolist(), batch.degree.tolist(), mean.sum(1).tolist(), strict=False)
        self.seen[stage] += [(node, (degree, round(value, 4))) for node, degree, value in seeds]
        return torch.nn.functional.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

    def training_step(self, batch, batch_idx):
        loss = self.step(batch, "train")
        self.log("train_loss", loss, batch_size=batch.batch_size)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch, "val"), batch_size=batch.batch_size, sync_dist=True)

    def on_train_end(self):
        print(f"seen {self.seen}\n", end="", flush=True)  # one write, so that lines of other ranks cannot mix in

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


if __name__ == "__main__":
    SageMakerCLI(GraphSAGE, PapersData, trainer_defaults={"num_sanity_val_steps": 0})
