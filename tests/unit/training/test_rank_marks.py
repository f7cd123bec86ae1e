"""What a process prints of errors and warnings, with its rank where its host has several."""

from __future__ import annotations

import sys
import warnings
from functools import partial

import pytest
import torch.distributed as dist

from lightning_sm.launcher.failure import Place, Role, failure_reason
from lightning_sm.training.rank_marks import mark_errors


@pytest.fixture(autouse=True)
def _hooks(monkeypatch):
    """Python's own hooks, also after the test."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)


def _print_error():
    error = ValueError("a bad sample\nof two lines")
    sys.excepthook(ValueError, error, None)


def test_errors_name_their_rank(capsys):
    """Every line is marked as torch would, so that the reason of the failure has the rank."""
    mark_errors(lambda: 3)
    _print_error()
    text = capsys.readouterr().err
    assert text == "[rank3]: ValueError: a bad sample\n[rank3]: of two lines\n"
    headline = '[rank3]: Traceback (most recent call last):\n[rank3]:   File "x.py", line 7, in f\n[rank3]:     f()\n'
    reason = failure_reason(headline + text, 1, Place("algo-2", Role.TRAINER)).text
    assert reason.startswith("ValueError: a bad sample\nof two lines\non trainer host algo-2, rank 3 (exit code 1)")


def test_the_only_process_of_its_host_marks_nothing(capsys):
    """Nor does one that has started no others yet."""
    mark_errors(lambda: None)
    _print_error()
    assert capsys.readouterr().err == "ValueError: a bad sample\nof two lines\n"
    assert warnings.formatwarning("soon", UserWarning, "x.py", 7, "f()") == "x.py:7: UserWarning: soon\n  f()\n"


def test_marks_end_when_they_are_undone(capsys):
    """The hooks of before are back; where another hook has wrapped ours, ours marks nothing."""
    excepthook, format_warning = sys.excepthook, warnings.formatwarning
    unmark = mark_errors(lambda: 1)
    unmark()
    assert (sys.excepthook, warnings.formatwarning) == (excepthook, format_warning)
    unmark = mark_errors(lambda: 1)
    sys.excepthook = partial(sys.excepthook)
    unmark()
    _print_error()
    assert capsys.readouterr().err == "ValueError: a bad sample\nof two lines\n"


def test_torch_marks_what_comes_after_the_process_group(capsys, tmp_path):
    """No line has two marks, whichever hook was there first."""
    mark_errors(lambda: 0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        _print_error()
    finally:
        dist.destroy_process_group()
    text = capsys.readouterr().err
    assert text.count("[rank0]: ") == len(text.splitlines())
