"""The summary at the end of a run, which says where its time went."""

from __future__ import annotations

from lightning_sm._text import count, duration
from lightning_sm.record.step_clock import Totals

# Leave out parts with a smaller share of the steps' time, and shorter spans.
_MIN_SHARE = 0.005
_MIN_SPAN_S = 0.05

_PARTS = {
    ("forward", "backward"): "forward and backward",
    ("data_wait",): "data wait",
    ("to_device",): "transfer to the device",
    ("optimizer",): "optimizer",
    ("other",): "other",
}
_SPANS = {
    "first_batch": "first batches",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "export": "model export",
}


def summary(totals: Totals, *, is_alone: bool = True, on_gpu: bool = False, verdict: str = "") -> str:
    """Return where the time of a run went, in a sentence or two.

    Args:
        totals: The measurements of rank 0, of at least one step.
        is_alone: Whether rank 0 is the only rank. Otherwise it waits for the others in the backward pass.
        on_gpu: Whether parts were measured on a GPU.
        verdict: What held up training, as a sentence.
    """
    shares = {name: totals.share(*parts) for parts, name in _PARTS.items()}
    named = [(name, share) for name, share in shares.items() if share >= _MIN_SHARE]
    named.sort(key=lambda item: (item[0] == "other", -item[1]))
    parts = ", ".join(f"{share:.0%} {name}" for name, share in named)
    spans = [
        f"{duration(totals.spans[name])} {words}"
        for name, words in _SPANS.items()
        if totals.spans.get(name, 0.0) >= _MIN_SPAN_S
    ]
    whose = "" if is_alone else "Rank 0: "
    each_s = totals.wall_s / totals.num_steps
    steps = f"{count(totals.num_steps, 'step')} in {duration(totals.wall_s)} ({duration(each_s)} each)"
    text = f"{whose}{steps}: {parts}"
    if not is_alone:
        text += ", waiting for other ranks included in backward"
    if on_gpu:
        text += " (of the GPU's time)"
    if spans:
        text += f"; in addition, {', '.join(spans)}"
    return f"{text}. {verdict}".rstrip()
