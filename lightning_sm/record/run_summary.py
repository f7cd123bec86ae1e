"""The last words of a run: where its time went."""

from __future__ import annotations

from lightning_sm.record.step_clock import Totals

# Of the steps' time, and seconds besides them: less is not named.
_MIN_SHARE = 0.005
_MIN_SPAN_S = 0.05
# From here on, tenths of seconds, and milliseconds of a step, say nothing.
_WHOLE_SECONDS = 100.0
_MINUTE_S = 60
_HOUR_S = 3600
_SECOND_MS = 1000.0
_TEN_MS = 10.0

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
        totals: What rank 0 has measured; at least one step.
        is_alone: Whether it is the only rank. Otherwise it waits for the others in the backward pass.
        on_gpu: Whether parts were measured on a GPU.
        verdict: What held up training, as a sentence.
    """
    shares = {name: totals.share(*parts) for parts, name in _PARTS.items()}
    named = [(name, share) for name, share in shares.items() if share >= _MIN_SHARE]
    named.sort(key=lambda item: (item[0] == "other", -item[1]))
    parts = ", ".join(f"{share:.0%} {name}" for name, share in named)
    spans = [
        f"{seconds_text(totals.spans[name])} {words}"
        for name, words in _SPANS.items()
        if totals.spans.get(name, 0.0) >= _MIN_SPAN_S
    ]
    steps = "1 step" if totals.num_steps == 1 else f"{totals.num_steps} steps"
    whose = "" if is_alone else "Rank 0: "
    text = f"{whose}{steps} in {seconds_text(totals.wall_s)} ({_each(totals.wall_s / totals.num_steps)} each): {parts}"
    if not is_alone:
        text += ", waiting for other ranks included in backward"
    if on_gpu:
        text += " (of the GPU's time)"
    if spans:
        text += f"; in addition, {', '.join(spans)}"
    return f"{text}. {verdict}".rstrip()


def seconds_text(seconds: float) -> str:
    """Return a duration in words: ``12.3 s``, ``4 min 5 s``, ``3 h 12 min``."""
    if seconds < _WHOLE_SECONDS:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    if seconds < _HOUR_S:
        return f"{minutes} min {rest} s"
    return f"{minutes // _MINUTE_S} h {minutes % _MINUTE_S} min"


def _each(seconds: float) -> str:
    ms = 1e3 * seconds
    if ms >= _SECOND_MS:
        return f"{seconds:.2f} s"
    return f"{ms:.1f} ms" if ms < _TEN_MS else f"{ms:.0f} ms"
