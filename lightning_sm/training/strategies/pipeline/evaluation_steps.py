"""``validation_step`` and ``test_step``, which the rank of the last stage runs for all ranks of its replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sm.training.strategies.pipeline.effects import EffectRecorder, StepEffects
from lightning_sm.training.strategies.pipeline.evaluation import Evaluation
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import drawn_seed
from lightning_sm.training.strategies.pipeline.rows import tensors_of
from lightning_sm.training.strategies.pipeline.steps import UserSteps


class _NetworkRun(NamedTuple):
    """The order to run the network.

    Attributes:
        num_microbatches: How many pass through the stages.
        seed: The seed of the stages' random numbers.
    """

    num_microbatches: int
    seed: int


class _OfBatch(NamedTuple):
    """A tensor of the batch, which all ranks have, by its number."""

    number: int


class EvaluationSteps:
    """The steps of validation and test: the outputs of the network stay on the rank of the last stage.

    That rank runs the user's step, with any number of calls of the network. The other ranks of the replica run their
    stages when it tells them to, and repeat the effects of the step at its end.

    Args:
        steps: The user's steps.
        evaluation: The forward pass.
        effects: The recorder of effects.
        replica: The ranks of the replica.
    """

    def __init__(self, steps: UserSteps, evaluation: Evaluation, effects: EffectRecorder, replica: Replica) -> None:
        self._steps = steps
        self._evaluation = evaluation
        self._effects = effects
        self._replica = replica

    def __call__(self, name: str, step: Callable[[], Any], batch: Any) -> Any:
        """Run a step; a collective call of the replica.

        Args:
            name: Name of the user's method.
            step: Calls it.
            batch: The batch, the same on all ranks of the replica.

        Returns:
            What the user's method returns. On other ranks than that of the last stage, tensors of several numbers, and
            objects, are left out.
        """
        if self._replica.is_last:
            return self._lead(name, step, batch)
        return self._follow(batch)

    def _lead(self, name: str, step: Callable[[], Any], batch: Any) -> Any:
        result: Any = None
        effects: StepEffects | None = None
        error: Exception | None = None
        is_running = False

        def run(*inputs: Any) -> Any:
            nonlocal is_running
            is_running = True
            output = self._run(inputs, batch)
            is_running = False
            return output

        try:
            with self._steps.network_as(run):
                result, effects = self._effects.record(name, step)
        except Exception as raised:
            if is_running:
                raise  # the other ranks are within a transfer, and fail when this process ends
            error = raised
        self._replica.broadcast(None, self._replica.last)
        self._replica.raise_together(error)
        self._replica.broadcast(effects, self._replica.last)
        return result

    def _run(self, inputs: tuple[Any, ...], batch: Any) -> Any:
        order = _NetworkRun(self._evaluation.num_microbatches(inputs), drawn_seed())
        self._replica.broadcast(order, self._replica.last)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors_of(batch))}
        sent = [_OfBatch(numbers[id(value)]) if id(value) in numbers else value for value in inputs]
        self._replica.send(sent, 0)
        return self._evaluation.output_of_last(inputs, order.num_microbatches, order.seed)

    def _follow(self, batch: Any) -> Any:
        while (order := self._replica.broadcast(None, self._replica.last)) is not None:
            inputs: tuple[Tensor, ...] = ()
            if self._replica.position == 0:
                of_batch = list(tensors_of(batch))
                received = self._replica.receive(self._replica.last)
                inputs = tuple(of_batch[one.number] if isinstance(one, _OfBatch) else one for one in received)
            self._evaluation.output_of_last(inputs, order.num_microbatches, order.seed)
        self._replica.raise_together(None)
        return self._effects.repeat(self._replica.broadcast(None, self._replica.last))
