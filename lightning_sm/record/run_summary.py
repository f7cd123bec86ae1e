"""The summary at the end of a run, which says where its time went."""

from __future__ import annotations

from lightning_sm._text import count, duration, percent
from lightning_sm.record.events import SPANS
from lightning_sm.record.totals import Totals

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


def summary(totals: Totals, *, is_alone: bool = True, on_gpu: bool = False) -> str:
    """Return where the time of a run went, in a sentence or two.

    Args:
        totals: The measurements of rank 0, of at least one step.
        is_alone: Whether rank 0 is the only rank. Otherwise it waits for the others in the backward pass.
        on_gpu: Whether parts were measured on a GPU.
    """
    shares = {name: totals.share(*parts) for parts, name in _PARTS.items()}
    named = [(name, share) for name, share in shares.items() if share >= _MIN_SHARE]
    named.sort(key=lambda item: (item[0] == "other", -item[1]))
    parts = ", ".join(f"{percent(share)} {name}" for name, share in named)
    spans = [
        f"{duration(totals.spans[name])} {words}"
        for name, words in SPANS.items()
        if totals.spans.get(name, 0.0) >= _MIN_SPAN_S
    ]
    whose = "" if is_alone else "Rank 0: "
    steps = f"{count(totals.num_trained, 'step')}{', without the first one' if totals.num_untimed else ''}"
    text = f"{whose}{steps} in {duration(totals.wall_s)} ({duration(totals.step_s)} each): {parts}"
    if not is_alone:
        text += ", waiting for other ranks included in backward"
    if on_gpu:
        text += " (of the GPU's time)"
    if spans:
        text += f"; in addition, {', '.join(spans)}"
    return f"{text}."
