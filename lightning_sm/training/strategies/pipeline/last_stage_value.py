"""What stands for a value of a step on the ranks that have not run it."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sm.errors import StrategyError

REMEDY = "outputs: all of the strategy, with which each rank runs the whole step"
# Python looks these up in the class: __getattr__ does not get them.
_OPERATIONS = (
    *(
        "bool",
        "len",
        "iter",
        "next",
        "getitem",
        "setitem",
        "contains",
        "call",
        "array",
        "float",
        "int",
        "index",
        "round",
    ),
    *("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert"),
    *(
        f"{side}{operator}"
        for operator in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
        for side in ("", "r")
    ),
)


class LastStageValue:
    """Stands for a value that a step has returned on the rank of the last stage alone; its use is an error.

    Such values may be as large as the network's outputs, so the other ranks do not get them. Keeping, copying, pickling
    and printing what stands for one works.

    Args:
        value: The value.
        place: The expression that a hook has for it, such as ``outputs["logits"]``.
        step: Name of the user's method that has returned it.
    """

    __slots__ = ("_text",)

    def __init__(self, value: Any, place: str, step: str) -> None:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        self._text = f"{place} of {step}, {kind}, stays on the rank of the last stage of the pipeline"

    def __repr__(self) -> str:
        """Return what it is."""
        return f"<{self._text}>"

    __hash__ = object.__hash__

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StrategyError(f"{self._text}, and is used on another one. Set {REMEDY}.")

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error.

        Args:
            name: An attribute of the value.

        Raises:
            AttributeError: It is one of those by which Python asks what an object can do.
            StrategyError: It is any other.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Raise an error: the value is an argument of a function of torch."""
        for argument in tree_leaves((arguments, keywords)):
            if isinstance(argument, cls):
                argument._refuse()
        return NotImplemented


for _name in _OPERATIONS:
    setattr(LastStageValue, f"__{_name}__", LastStageValue._refuse)
