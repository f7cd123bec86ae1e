"""A GPT-2 of transformers whose blocks are the layers of a pipeline, as in docs/strategies.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.integration.training.strategies.pipeline_models import IGNORED, Recorded

TOKENS, LENGTH = 40, 9


class GPT2(nn.Module):
    """The layers of a GPT-2, which pass on the hidden states and the padding mask.

    Args:
        model: A ``GPT2LMHeadModel``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding = _Embedding(model.transformer)
        self.blocks = nn.ModuleList(_Block(block) for block in model.transformer.h)
        self.head = _Head(model)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in execution order."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits, when the network runs in one process."""
        values = self.embedding(tokens, mask)
        for layer in (*self.blocks, self.head):
            values = layer(values)
        logits: Tensor = values
        return logits


class _Embedding(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.tokens, self.places, self.drop = base.wte, base.wpe, base.drop

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.drop(self.tokens(tokens) + self.places(places)), mask


class _Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = values
        length = mask.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril() & mask[:, None, None].bool()
        bias = torch.zeros(seen.shape, dtype=hidden.dtype, device=mask.device)
        hidden = self.block(hidden, attention_mask=bias.masked_fill(~seen, torch.finfo(hidden.dtype).min))
        return hidden, mask


class _Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(self.norm(values[0]))


class LanguageModel(Recorded):
    """A LightningModule with a randomly initialized GPT-2, whose embedding and head share weights."""

    lr = 0.1

    def __init__(self) -> None:
        import transformers

        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # stages draw other random numbers
        config = transformers.GPT2Config(
            vocab_size=TOKENS, n_positions=16, n_embd=16, n_layer=6, n_head=2, use_cache=False, **dropout
        )
        model = transformers.GPT2LMHeadModel(config)
        super().__init__(GPT2(model))
        self.extra["loss of transformers"] = [
            float(model(input_ids=tokens, attention_mask=mask, labels=labels).loss)
            for tokens, mask, labels in [padded_text(16, 3).tensors]
        ]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the mean over the tokens that are not padding."""
        tokens, mask, labels = batch
        logits = self.network(tokens, mask)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def padded_text(rows: int, seed: int) -> TensorDataset:
    """Return padded rows of 2 to 9 tokens, with the padding mask and labels."""
    drawn = torch.randint(0, TOKENS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(LENGTH) < 2 + torch.arange(rows)[:, None] % (LENGTH - 1)
    return TensorDataset(drawn * mask, mask.long(), drawn.masked_fill(~mask, IGNORED))


GPT2_MODELS: dict[str, Any] = {"gpt2": (LanguageModel, padded_text)}
