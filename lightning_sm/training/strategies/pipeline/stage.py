"""A stage of a network: the layers that one rank runs between two exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_sm.errors import StrategyError


class Stage(nn.Module):
    """A sequence of layers, each of which gets the output of the one before, as in an ``nn.Sequential``.

    Args:
        layers: The layers.
        names: The names of the layers, for messages.
        is_first: Whether this stage gets the network's inputs.
    """

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str], *, is_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._names = names
        self._is_first = is_first

    def forward(self, *inputs: Any) -> Any:
        """Run the layers.

        Args:
            inputs: The output of the previous stage, or the network's inputs.

        Returns:
            A tensor, or a tuple of at least two.

        Raises:
            StrategyError: The last layer returns something else, which stages cannot exchange.
        """
        first, *others = self.layers
        # Only the network's inputs are passed as several arguments; between layers, a tuple is one argument. Copy it:
        # the layer may change its input in place, which torch refuses for what needs a gradient.
        value = first(*inputs) if self._is_first else first(as_output([tensor.clone() for tensor in inputs]))
        for layer in others:
            value = layer(value)
        is_tuple = isinstance(value, tuple) and len(value) > 1 and all(isinstance(item, Tensor) for item in value)
        if not isinstance(value, Tensor) and not is_tuple:
            kinds = [type(item).__name__ for item in value] if isinstance(value, (tuple, list)) else []
            shown = f"{type(value).__name__} of {', '.join(kinds)}" if kinds else type(value).__name__
            raise StrategyError(
                f"{self._names[-1]}, the last layer of its stage, returns a {shown}, but stages exchange a tensor or a "
                "tuple of at least two tensors. Change what the layer returns, or cut elsewhere with split=[...]."
            )
        return value


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return the output of a stage as arguments for the next stage.

    Args:
        output: A tensor, or a tuple of tensors.
    """
    return output if isinstance(output, tuple) else (output,)


def as_output(values: Sequence[Any]) -> Any:
    """Return values in the form in which stages return them: one tensor, or a tuple.

    Args:
        values: The tensors.
    """
    return values[0] if len(values) == 1 else tuple(values)
