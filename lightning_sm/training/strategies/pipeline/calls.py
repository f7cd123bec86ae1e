"""The call of the network in the user's code: the tensors that pass through the stages, and what the call returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_sm.errors import StrategyError


class CallForm(NamedTuple):
    """What stages must know of a call besides its tensors.

    Args:
        names: The names of the tensors, in their order; empty if they are positional.
        constants: The other arguments, by name.
        unsent: The tensor that only the first stage reads: its name, the shape of a row, and its dtype.
    """

    names: tuple[str, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    unsent: tuple[str, tuple[int, ...], Any] | None = None


@dataclass(frozen=True)
class NetworkCall:
    """A call of the network.

    Args:
        tensors: What passes through the stages.
        form: What stages must know besides.
        arguments: All arguments by name, if the network takes names.
    """

    tensors: tuple[Any, ...]
    form: CallForm = field(default_factory=CallForm)
    arguments: Mapping[str, Any] = field(default_factory=dict)


class NetworkCalls(Protocol):
    """The rules by which the user's code calls a network.

    Attributes:
        form: The form of the call whose tensors pass through the stages now; the same on all ranks of a replica.
        every_rank_binds: Whether stages other than the first need the form.
    """

    form: CallForm
    every_rank_binds: bool

    def bind(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> NetworkCall:
        """Return the call.

        Args:
            arguments: The positional arguments.
            keywords: The others.

        Raises:
            StrategyError: Stages cannot honour it.
        """

    def result(self, output: Any, call: NetworkCall) -> Any:
        """Return what the user's code gets of a call.

        Args:
            output: The output of the last stage.
            call: The call.
        """

    def counts(self, call: NetworkCall) -> Tensor | None:
        """Return how many values of each row the loss averages over, or None if the call does not say so.

        Args:
            call: The call.
        """


class PositionalCalls:
    """The calls of a network whose layers take what the one before returns: ``self.network(x, y)``.

    Args:
        where: What calls it, for messages: "Model calls self.network".
    """

    every_rank_binds = False

    def __init__(self, where: str) -> None:
        self._where = where
        self.form = CallForm()

    def bind(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> NetworkCall:
        """Return the call; see ``NetworkCalls``.

        Args:
            arguments: The positional arguments.
            keywords: The others.

        Raises:
            StrategyError: There are keywords.
        """
        if keywords:
            raise StrategyError(
                f"{self._where}({', '.join(keywords)}=...). Stages get positional arguments only: remove the names."
            )
        return NetworkCall(arguments)

    def result(self, output: Any, call: NetworkCall) -> Any:
        """Return the output of the last stage as it is."""
        return output

    def counts(self, call: NetworkCall) -> Tensor | None:
        """Return None: a loss is of rows unless the module says otherwise."""
        return None
