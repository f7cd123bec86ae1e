"""Fine-tuning of a text classifier in the style of Hugging Face, with rows as dicts and dynamic padding."""

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_sm import SageMakerCLI


class Tokenizer:
    def __init__(self, words):
        self.vocab = {"[PAD]": 0, **{word: number for number, word in enumerate(words, start=1)}}

    def __call__(self, text):
        ids = [self.vocab[word] for word in text.split()]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def pad(self, features):
        padded = {
            name: pad_sequence([torch.tensor(feature[name]) for feature in features], batch_first=True)
            for name in ("input_ids", "attention_mask")
        }
        labels = torch.tensor([feature["label"] for feature in features])
        return {**padded, "labels": labels, "sentence": [feature["sentence"] for feature in features]}


class GLUEDataModule(LightningDataModule):
    def __init__(self, model_name_or_path: str = "tiny", train_batch_size: int = 4, eval_batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        generator = torch.Generator().manual_seed(0)
        words = [f"word{number}" for number in range(50)]
        self.tokenizer = Tokenizer(words)
        self.id2label = {0: "negative", 1: "positive"}
        self.num_labels = len(self.id2label)
        self.rows = []
        for number in range(80):
            length = int(torch.randint(3, 30, (1,), generator=generator))
            sentence = " ".join(words[index] for index in torch.randint(0, 50, (length,), generator=generator).tolist())
            self.rows.append({"sentence": sentence, "label": number % 2, "idx": number, **self.tokenizer(sentence)})

    def collate(self, features):
        return self.tokenizer.pad(features)

    def train_dataloader(self):
        return DataLoader(
            self.rows[:64], batch_size=self.hparams.train_batch_size, shuffle=True, collate_fn=self.collate
        )

    def val_dataloader(self):
        matched = DataLoader(self.rows[64:72], self.hparams.eval_batch_size, collate_fn=self.collate)
        mismatched = DataLoader(
            self.rows[72:],
            self.hparams.eval_batch_size,
            collate_fn=lambda rows: self.collate(sorted(rows, key=lambda row: -len(row["input_ids"]))),
        )
        return [matched, mismatched]


class GLUETransformer(LightningModule):
    def __init__(self, learning_rate: float = 2e-3, warmup_steps: int = 0, weight_decay: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = torch.nn.Embedding(51, 8, padding_idx=0)
        self.head = torch.nn.Linear(8, 2)

    def setup(self, stage: str):
        self.names = self.trainer.datamodule.id2label

    def forward(self, input_ids, attention_mask, labels, sentence):
        assert len(sentence) == len(labels)
        hidden = (self.embedding(input_ids) * attention_mask.unsqueeze(-1)).sum(1) / attention_mask.sum(1, keepdim=True)
        logits = self.head(hidden)
        return torch.nn.functional.cross_entropy(logits, labels), logits

    def training_step(self, batch, batch_idx):
        loss, _ = self(**batch)
        self.log("train_loss", loss, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss, logits = self(**batch)
        named = [self.names[index] for index in logits.argmax(1).tolist()]
        self.log("val_loss", loss, batch_size=len(named), sync_dist=True)

    def configure_optimizers(self):
        no_decay = ["bias"]
        groups = [
            {
                "params": [p for n, p in self.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {"params": [p for n, p in self.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.hparams.learning_rate)


if __name__ == "__main__":
    SageMakerCLI(GLUETransformer, GLUEDataModule, seed_everything_default=42)
