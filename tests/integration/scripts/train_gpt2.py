"""A language model of transformers in a LightningModule that knows no pipeline."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_sm import SageMakerCLI

TOKENS, LENGTH = 40, 12


class LanguageModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        config = AutoConfig.for_model("gpt2", vocab_size=TOKENS, n_positions=LENGTH, n_embd=16, n_layer=4, n_head=2)
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.log("loss", outputs.loss, prog_bar=True)
        return outputs.loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Text(pl.LightningDataModule):
    """Rows that count up from another token each, and are padded."""

    def rows(self, number):
        for row in range(number):
            ids = (row + torch.arange(LENGTH)) % (TOKENS - 3) + 3
            mask = (torch.arange(LENGTH) < LENGTH - row % 5).long()
            yield {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def train_dataloader(self):
        return DataLoader(list(self.rows(160)), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(list(self.rows(20)), batch_size=10)


if __name__ == "__main__":
    SageMakerCLI(LanguageModel, Text)
