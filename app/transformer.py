"""A small transformer that predicts the next byte of a text."""

from __future__ import annotations

from collections import OrderedDict

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from app.schedule import with_schedule

Batch = tuple[Tensor, Tensor]


class TransformerLanguageModel(LightningModule):
    """Predict each token of a text from the tokens before it, with a decoder-only transformer trained from scratch.

    ``self.network`` holds all parameters. It is a plain ``nn.Sequential`` of embedding, blocks and head, so it can be
    cut into the stages of a pipeline. ``ModelParallelStrategy`` shards it instead.

    The optimizer is AdamW. The learning rate rises for a fifth of the run and then falls to zero along a cosine, for
    any number of hosts. To replace either, use --optimizer and --lr_scheduler on the command line.

    Args:
        num_tokens: Number of different tokens, which the command line takes from the data.
        context: Maximum number of tokens in a window, which the command line takes from the data.
        width: Number of features of a token.
        num_blocks: Number of blocks; each has attention and a perceptron.
        num_heads: Number of attention heads, a divisor of ``width``.
        dropout: Share of features that each block drops in training. With dropout, results depend on how the network
            is split over ranks.
        learning_rate: Highest learning rate of the run.
        weight_decay: Weight decay of AdamW.

    Raises:
        ValueError: ``num_heads`` is not a divisor of ``width``.
    """

    def __init__(
        self,
        num_tokens: int,
        context: int,
        *,
        width: int = 64,
        num_blocks: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width={width} cannot be divided among num_heads={num_heads} heads of equal size.")
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        blocks = {f"block{index}": Block(width, num_heads, dropout) for index in range(num_blocks)}
        self.network = nn.Sequential(
            OrderedDict(embedding=Embedding(num_tokens, context, width), **blocks, head=Head(width, num_tokens))
        )

    def configure_model(self) -> None:
        """Shard the network if the strategy is ``ModelParallelStrategy``; its mesh does not exist before this hook."""
        if self.device_mesh is not None and not isinstance(self.network, FSDPModule):  # fit and validate both call this
            _shard(self.network, self.device_mesh)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of each next token.

        Args:
            tokens: Windows of the text, (B, T) int64, where T is at most ``context``.

        Returns:
            Unnormalized scores, (B, T, num_tokens) float32.
        """
        logits: Tensor = self.network(tokens)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of a batch in nats per token, a scalar."""
        loss = self._step(batch, "train")
        # Log this process's loss only: synchronizing it would cost a collective call in every step.
        self.log("train_loss_step", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``val_loss``."""
        self._step(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``test_loss``."""
        self._step(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the likeliest next token after each token, (B, T) int64, ignoring the targets of the batch."""
        logits: Tensor = self(batch[0])
        return logits.argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Create AdamW and its learning rate schedule, which advances after every batch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        # The number of steps is infinite if the run has no last step, as with max_epochs=-1.
        return with_schedule(optimizer, self.trainer.estimated_stepping_batches)

    def _step(self, batch: Batch, stage: str) -> Tensor:
        tokens, targets = batch
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log(
            f"{stage}_loss",
            loss,
            on_step=False,
            on_epoch=True,
            prog_bar=stage != "train",
            sync_dist=True,
            batch_size=len(tokens),
        )
        return loss


class Embedding(nn.Module):
    """The first layer: an embedding of each token plus an embedding of its position in the window.

    Args:
        num_tokens: Number of different tokens.
        context: Maximum number of tokens in a window.
        width: Number of features of a token.
    """

    def __init__(self, num_tokens: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed windows, (B, T) int64, as (B, T, width) float32."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.tokens(tokens) + self.positions(positions)
        return embedded


class Block(nn.Module):
    """One block: each token attends to the tokens before it, then a perceptron transforms each token.

    Args:
        width: Number of features of a token.
        num_heads: Number of attention heads.
        dropout: Share of features that is dropped in training.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Compute new features of the same shape, (B, T, width)."""
        features = features + self.dropout(self.attention(self.norm1(features)))
        hidden = functional.gelu(self.expand(self.norm2(features)))
        result: Tensor = features + self.dropout(self.contract(hidden))
        return result


class Attention(nn.Module):
    """Causal self-attention.

    Args:
        width: Number of features of a token.
        num_heads: Number of heads.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._head_width = width // num_heads
        # Three layers rather than one, so that tensor parallelism can give each rank some heads of each.
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.join = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Let each token of (B, T, width) attend to itself and to the tokens before it."""
        # Derive the number of heads from the width: with tensor parallelism, this rank has only some of them.
        query, key, value = (
            layer(features).unflatten(-1, (-1, self._head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.join(attended.transpose(1, 2).flatten(2))
        return joined


class Head(nn.Module):
    """The last layer: the logits of each next token.

    Args:
        width: Number of features of a token.
        num_tokens: Number of different tokens.
    """

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, num_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """Compute (B, T, num_tokens) from (B, T, width)."""
        logits: Tensor = self.linear(self.norm(features))
        return logits


def _shard(network: nn.Sequential, mesh: DeviceMesh) -> None:
    """Split the blocks' matrices over the tensor-parallel ranks, and all parameters over the data-parallel ranks."""
    if mesh["tensor_parallel"].size() > 1:
        split_in, split_out, whole = ColwiseParallel(), RowwiseParallel(), _Whole()
        plan = {
            "embedding.*": whole,
            "block*.norm*": whole,
            "block*.attention.query": split_in,
            "block*.attention.key": split_in,
            "block*.attention.value": split_in,
            "block*.attention.join": split_out,
            "block*.expand": split_in,
            "block*.contract": split_out,
            "head.*": whole,
        }
        parallelize_module(network, mesh["tensor_parallel"], plan)
    for layer in network:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(network, mesh=mesh["data_parallel"])


class _Whole(ParallelStyle):
    """A style that replicates a layer on the mesh of the other layers, so that gradients are clipped by one norm."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch annotates both functions without their return values.
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    @staticmethod
    def _enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(tensor, mesh, [Replicate()]) for tensor in inputs)

    @staticmethod
    def _leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        local: Tensor = output.to_local()
        return local
