"""Models of transformers, as a LightningModule holds them: tiny configurations with random weights, and their data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

CAUSAL = "AutoModelForCausalLM"
SEQUENCES = "AutoModelForSequenceClassification"
IMAGES = "AutoModelForImageClassification"
TOKENS = 40
CLASSES = 3
_LENGTH = 9
_TEXT = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OF_IMAGES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_labels")
# Stages have other random numbers than one process.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Shorter than the rows, in every second layer of some families; heads have a size of their own.
_WINDOW = {"sliding_window": 4, "head_dim": 8}
# What configurations have besides, or call otherwise.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0, "ffn_dim": 32, "word_embed_proj_dim": 16},
    **dict.fromkeys(("bert", "dinov2", "roberta", "vit", "xlm-roberta"), _NO_DROPOUT),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "mistral", "qwen3"), _WINDOW),
}


def make(auto: str, family: str, **options: Any) -> Any:
    """Return a model of transformers.

    Args:
        auto: The class that makes it, such as "AutoModelForCausalLM".
        family: Its ``model_type``.
        options: Further ones of its configuration.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    sizes: Mapping[str, Any] = _TEXT
    if auto == IMAGES:
        sizes = {**{name: _TEXT[name] for name in _OF_IMAGES}, "image_size": 8, "patch_size": 4}
    config = transformers.AutoConfig.for_model(family, **{**sizes, **_OWN.get(family, {}), **options})
    return getattr(transformers, auto).from_config(config)


class Pretrained(pl.LightningModule):
    """A LightningModule as users write it: the model gets a batch, and returns its loss."""

    def __init__(self, auto: str, family: str, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        self.model = make(auto, family, **options)
        if recompute:
            self.model.gradient_checkpointing_enable()
        self.losses: list[float] = []

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss."""
        outputs = self.model(**batch)
        self.log("loss", outputs.loss, sync_dist=True)
        return outputs.loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log the loss, and numbers that depend on all logits, also of a call without mask and labels."""
        outputs = self.model(**batch)
        self.log("val_loss", outputs.loss, sync_dist=True)
        self.log("val_logits", outputs.logits.square().mean(), sync_dist=True)
        alone = self.model(batch[self.model.main_input_name])
        self.log("val_alone", alone.logits.square().mean(), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss of the step, of all replicas."""
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].clone())))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, whose steps shrink with the gradient."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Misused(Pretrained):
    """A module that wants of the model what stages do not have."""

    def __init__(self, how: str) -> None:
        super().__init__(CAUSAL, "gpt2")
        self.how = how

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Call the model in another way."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if self.how == "embeds":
            return self.model(inputs_embeds=torch.zeros(*ids.shape, 16), labels=ids).loss
        if self.how == "base model":
            return self.model.transformer(ids).last_hidden_state.sum()
        if self.how == "other names" and self.global_step == 2:
            return self.model(input_ids=ids, token_type_ids=mask, labels=batch["labels"]).loss
        outputs = self.model(**batch, **_ASKED.get(self.how, {}))
        if self.how == "twice":
            return outputs.loss + self.model(**batch).loss
        if self.how == "own loss":
            logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return (losses * mask[:, 1:]).sum()
        return outputs.loss


_ASKED: Mapping[str, Mapping[str, Any]] = {
    "hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "cache": {"use_cache": True},
    "tuple": {"past_key_values": ()},
}


class Declared(Pretrained):
    """A model of a family that is not known here, whose parts the script names."""

    def __init__(self, is_declared: bool = True) -> None:
        super().__init__(CAUSAL, "starcoder2")
        if is_declared:
            self.model.pipeline_parts = {"embedding": ["model.embed_tokens"], "blocks": "model.layers"}


def text(rows: int, seed: int, padding: str = "right", labels: str = "tokens") -> list[dict[str, Tensor]]:
    """Return rows of different lengths, padded, whose padding has no label.

    Args:
        rows: Their number.
        seed: Of their tokens.
        padding: The side on which they are padded.
        labels: "tokens": a causal model's; "some tokens": a masked one's; "class": one for each row.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in range(rows):
        # Microbatches have 4 rows; those of every third have full length, and in one all but one token is padding.
        length = _LENGTH if row // 4 % 3 == 0 else 2 + row % (_LENGTH - 2)
        tokens = torch.randint(3, TOKENS, (_LENGTH,), generator=generator)
        place = torch.arange(_LENGTH)
        mask = (place < length if padding == "right" else place >= _LENGTH - length).long()
        tokens = tokens * mask
        one = {"input_ids": tokens, "attention_mask": mask}
        if labels == "class":
            one["labels"] = tokens.sum() % CLASSES
        else:
            hidden = mask == 0
            if labels == "some tokens":
                hidden = hidden | (torch.rand(_LENGTH, generator=generator) < 0.7)
            one["labels"] = tokens.masked_fill(hidden, -100)
        found.append(one)
    return found


def images(rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Return images with their classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": torch.tensor(row % CLASSES)}
        for row in range(rows)
    ]


_DROPOUT = dict.fromkeys(_OWN["gpt2"], 0.2)
MISUSES = ("embeds", "other names", "base model", "twice", "own loss", *_ASKED)

PRETRAINED: dict[str, Any] = {
    "gpt2": (partial(Pretrained, CAUSAL, "gpt2"), text),
    "gpt2, recomputed": (partial(Pretrained, CAUSAL, "gpt2", recompute=True), text),
    "gpt2, dropout": (partial(Pretrained, CAUSAL, "gpt2", **_DROPOUT), text),
    "gpt2, dropout, recomputed": (partial(Pretrained, CAUSAL, "gpt2", recompute=True, **_DROPOUT), text),
    "gpt2, classes": (partial(Pretrained, SEQUENCES, "gpt2"), partial(text, labels="class")),
    "llama": (partial(Pretrained, CAUSAL, "llama"), partial(text, padding="left")),
    "llama, tied, eager": (
        partial(Pretrained, CAUSAL, "llama", tie_word_embeddings=True, attn_implementation="eager"),
        partial(text, padding="left"),
    ),
    "bert": (partial(Pretrained, SEQUENCES, "bert"), partial(text, labels="class")),
    "bert, masked": (partial(Pretrained, "AutoModelForMaskedLM", "bert"), partial(text, labels="some tokens")),
    "vit, classes": (partial(Pretrained, IMAGES, "vit"), images),
    "starcoder2": (Declared, text),
    "undeclared starcoder2": (partial(Declared, is_declared=False), text),
    **{how: (partial(Misused, how), text) for how in MISUSES},
}
