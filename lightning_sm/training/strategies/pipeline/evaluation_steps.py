"""``validation_step`` and ``test_step``, which the rank of the last stage runs for all ranks of its replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sm.training.strategies.pipeline.calls import CallForm, NetworkCall, NetworkCalls
from lightning_sm.training.strategies.pipeline.effects import EffectRecorder, StepEffects
from lightning_sm.training.strategies.pipeline.evaluation import Evaluation
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import drawn_seed
from lightning_sm.training.strategies.pipeline.rows import tensors_of
from lightning_sm.training.strategies.pipeline.steps import UserSteps


class _NetworkRun(NamedTuple):
    """The order to run the network.

    Attributes:
        form: How it is called.
        num_microbatches: How many pass through the stages.
        seed: The seed of the stages' random numbers.
    """

    form: CallForm
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
        calls: How the network is called.
        evaluation: The forward pass.
        effects: The recorder of effects.
        replica: The ranks of the replica.
        last: The position of the last stage in the replica.
    """

    def __init__(  # noqa: PLR0917  # the parts of a pipeline
        self,
        steps: UserSteps,
        calls: NetworkCalls,
        evaluation: Evaluation,
        effects: EffectRecorder,
        replica: Replica,
        last: int,
    ) -> None:
        self._steps = steps
        self._calls = calls
        self._evaluation = evaluation
        self._effects = effects
        self._replica = replica
        self._last = last

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
        if self._replica.position == self._last:
            return self._lead(name, step, batch)
        return self._follow(batch)

    def _lead(self, name: str, step: Callable[[], Any], batch: Any) -> Any:
        result: Any = None
        effects: StepEffects | None = None
        error: Exception | None = None
        is_running = False

        def run(call: NetworkCall) -> Any:
            nonlocal is_running
            is_running = True
            output = self._run(call, batch)
            is_running = False
            return output

        try:
            with self._steps.network_as(run):
                result, effects = self._effects.record(name, step)
        except Exception as raised:
            if is_running:
                raise  # the other ranks are within a transfer, and fail when this process ends
            error = raised
        self._replica.broadcast(None, self._last)
        self._replica.raise_together(error)
        self._replica.broadcast(effects, self._last)
        return result

    def _run(self, call: NetworkCall, batch: Any) -> Any:
        order = _NetworkRun(call.form, self._evaluation.num_microbatches(call.tensors), drawn_seed())
        self._calls.form = call.form
        self._replica.broadcast(order, self._last)
        if self._last != 0:
            numbers = {id(tensor): number for number, tensor in enumerate(tensors_of(batch))}
            inputs = [_OfBatch(numbers[id(value)]) if id(value) in numbers else value for value in call.tensors]
            self._replica.send(inputs, 0)
        return self._evaluation.output_of_last(call.tensors, order.num_microbatches, order.seed)

    def _follow(self, batch: Any) -> Any:
        while (order := self._replica.broadcast(None, self._last)) is not None:
            self._calls.form = order.form
            inputs: tuple[Tensor, ...] = ()
            if self._replica.position == 0:
                of_batch = list(tensors_of(batch))
                received = self._replica.receive(self._last)
                inputs = tuple(of_batch[one.number] if isinstance(one, _OfBatch) else one for one in received)
            self._evaluation.output_of_last(inputs, order.num_microbatches, order.seed)
        self._replica.raise_together(None)
        return self._effects.repeat(self._replica.broadcast(None, self._last))
