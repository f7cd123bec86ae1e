"""Tests of what a trainer raises for an exception on a data host: the user's error, its place, the traceback."""

from __future__ import annotations

import importlib

import pytest

from lightning_sm.data.protocol.failures import Failure, first_line
from lightning_sm.errors import RemoteTransformError
from lightning_sm.job.failure_file import ProcessFailure
from lightning_sm.job.topology import Role
from lightning_sm.launcher.failure import Place, script_failure
from lightning_sm.launcher.first_failure import EndedProcess


class OwnError(Exception):
    """An exception of the user's module."""


def _raised(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001 - return any exception
        return error
    raise AssertionError(function)


def _chained():
    try:
        {}["label"]
    except KeyError as error:
        raise ValueError("no label\nin img_40.jpg") from error


def _own():
    raise OwnError("bad")


def _raise(error):
    raise error


def _syntax():
    compile("def f(:", "broken.py", "exec")


@pytest.mark.parametrize(
    ("function", "message", "cause"),
    [
        (_chained, "ValueError: no label\nin img_40.jpg", "KeyError: 'label'"),
        (_own, f"{__name__}.OwnError: bad", "OwnError"),
        (_syntax, "SyntaxError: invalid syntax", "broken.py"),
    ],
)
def test_the_error_comes_first_then_its_place(function, message, cause):
    """The error comes first, even with several lines or a chain, followed by its place and the complete traceback."""
    text = Failure.of(_raised(function)).at("data host algo-3 (b:1), index 40")
    assert text.startswith(f"{message}\non data host algo-3 (b:1), index 40\nTraceback (most recent call last):\n")
    assert cause in text
    assert text.endswith(message)
    assert first_line(text) == message.partition("\n")[0]


def test_an_error_without_traceback_has_its_place_at_the_end():
    """A problem found by lightning_sm has no traceback, so its place follows the message."""
    failure = Failure("DataSettingsError", "val_dataloader() is a str.\n")
    assert failure.at("data host b") == "val_dataloader() is a str.\non data host b"


def test_the_launcher_reads_it_as_the_users_own_error():
    """The launcher's reason has the error, sample, data host, trainer host and the user's frames."""
    text = Failure.of(_raised(_chained)).at("data host algo-3 (b:1), index 40")
    own = ProcessFailure.of(_raised(lambda: _raise(RemoteTransformError(text))), rank=1)
    ended = EndedProcess(7, 1, 1, 2.0, own, has_reporter=True)
    reason = script_failure(ended, 1, "", Place("algo-1", Role.TRAINER)).reason.text.splitlines()
    assert reason[:4] == [
        "ValueError: no label",
        "in img_40.jpg",
        "on data host algo-3 (b:1), index 40",
        "passed on to trainer host algo-1, rank 1 (exit code 1)",
    ]
    assert "in _chained: raise ValueError" in reason[4]
    assert not any(line.endswith("raise error") for line in reason)


def test_a_module_that_is_missing_on_a_data_host_is_an_import_error():
    """A module missing on a data host is an import error on the trainer too, so that the job is not restarted."""
    failure = Failure.of(_raised(lambda: importlib.import_module("no_such_module")))
    assert failure.error == "RemoteImportError"
    assert Failure.of(_raised(_syntax)).error == "RemoteImportError"
