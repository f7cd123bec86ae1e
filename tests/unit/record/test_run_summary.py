"""The last words of a run."""

from lightning_sm.record.run_summary import summary
from lightning_sm.record.totals import Totals


def totals(n=40, spans=None, **parts):
    """What a rank has measured."""
    measured = Totals(num_steps=n, spans=spans or {})
    measured.parts.update(parts)
    return measured


def test_the_largest_parts_come_first():
    """Trifles are not named, and "other" is the last; then what took time besides the steps."""
    measured = totals(
        spans={"first_batch": 6.1, "validation": 2.0, "checkpoint": 0.001},
        data_wait=3.8, forward=3.0, backward=4.1, optimizer=0.5, other=0.9, to_device=0.01,
    )  # fmt: skip
    assert summary(measured) == (
        "40 steps in 12.3 s (308 ms each): 58% forward and backward, 31% data wait, 4% optimizer, 7% other; in "
        "addition, 6.1 s first batches, 2 s validation."
    )


def test_the_number_of_steps_is_that_of_the_run():
    """As in progress lines, also where the means leave out the first one."""
    measured = totals(n=103, forward=10.3)
    measured.num_untimed = 1
    assert summary(measured).startswith("104 steps, without the first one in 10.3 s (100 ms each): ")


def test_a_single_step_on_a_gpu():
    """The number agrees with its noun, and it is said whose time it is."""
    said = summary(totals(n=1, forward=1.5), on_gpu=True)
    assert said == "1 step in 1.5 s (1.5 s each): 100% forward and backward (of the GPU's time)."
