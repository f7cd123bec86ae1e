"""Functions are called when they are due, and in the order of their times."""

from lightning_sm.data.host.timers import Timers


def test_due_functions_run_in_order():
    """Functions of the same time keep their order; one that is not due waits, and says for how long."""
    timers, called = Timers(), []
    assert timers.wait_s is None
    for seconds, name in ((600.0, "late"), (-1.0, "second"), (-2.0, "first"), (-1.0, "third")):
        timers.call_later(seconds, lambda name=name: called.append(name))
    assert timers.wait_s == 0.0
    timers.run_due()
    assert called == ["first", "second", "third"]
    assert 590.0 < timers.wait_s <= 600.0
    timers.run_due()
    assert len(called) == 3


def test_a_function_may_call_itself_later():
    """It does not keep the others from their turn."""
    timers, called = Timers(), []

    def again():
        called.append("again")
        timers.call_later(600.0, again)

    timers.call_later(0.0, again)
    timers.run_due()
    assert called == ["again"]
    assert timers.wait_s > 590.0
