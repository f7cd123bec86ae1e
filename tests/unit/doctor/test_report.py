"""The doctor's report, and how it survives checks that fail or hang."""

from __future__ import annotations

import json
import threading

import pytest

from lightning_sm.doctor import report
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.parallel import in_parallel
from lightning_sm.doctor.report import Status, ok, problem, warning
from lightning_sm.doctor.run import CHECKS, examine

_FINE, _HURTS, _FAILS = ok("disk", "50 GiB"), warning("clock", "off", "Set it."), problem("names", "lost", "Wait.")


@pytest.mark.parametrize(
    ("results", "strict", "code"),
    [
        ([_FINE], True, 0),
        ([_FINE, _HURTS], False, 0),
        ([_FINE, _HURTS], True, 1),
        ([_FINE, _FAILS], False, 1),
        ([], True, 0),
    ],
)
def test_exit_code(results, strict, code):
    """A problem gives 1, and with strict a warning does, too."""
    assert report.exit_code(results, strict=strict) == code


def test_table_has_a_row_for_each_result():
    """Each row shows name, status, finding and advice, in the order of the checks."""
    lines = report.table([_FINE, _HURTS, _FAILS], 120).splitlines()
    assert lines[0].split() == ["check", "status", "found", "what", "to", "do"]
    assert [line.split()[:2] for line in lines[2:]] == [["disk", "ok"], ["clock", "warning"], ["names", "problem"]]
    assert lines[3].endswith("Set it.")


@pytest.mark.parametrize("width", [1, 100, 100_000])
def test_table_keeps_to_its_width(width):
    """Long texts are wrapped to the width, within reason, and nothing is lost."""
    result = problem("name " * 9, "found " * 99, "advice " * 99)
    table = report.table([result], width)
    assert max(map(len, table.splitlines())) <= min(max(width, 80), 200)
    assert (table.count("found"), table.count("advice")) == (100, 99)  # one of them in the headline


def test_table_escapes_what_a_terminal_would_obey():
    """Control characters and lone surrogates in names become visible text."""
    table = report.table([ok("job", "a\x1b[31mb\ud800c")], 120)
    assert r"a\x1b[31mb\ud800c" in table


def test_summary_names_what_is_wrong():
    """One line counts the results and names problems and warnings, each once."""
    line = report.summary([_FINE, _HURTS, _FAILS, _FAILS], 1.26)
    assert line == "2 problems (names), 1 warning (clock), 1 ok; 1.3 s."


def test_json_holds_everything():
    """The JSON has all results, their counts and the exit code."""
    facts = json.loads(report.as_json([_FINE, _HURTS], 1.5, 0))
    assert facts["results"][1] == {"name": "clock", "status": "warning", "found": "off", "advice": "Set it."}
    assert facts["counts"] == {"ok": 1, "warning": 1, "problem": 0}
    assert (facts["exit_code"], facts["seconds"]) == (0, 1.5)


def test_check_that_raises_is_a_problem_of_its_own():
    """An exception in one check becomes a row; what the check found before and the other checks stay."""

    def broken(_context):
        yield _FINE
        raise RuntimeError("no pulse")

    def sound(_context):
        yield _HURTS

    results = examine(Context.of({}, 10), [broken, sound])
    assert [result.status for result in results] == [Status.OK, Status.PROBLEM, Status.WARNING]
    assert results[1].name == "broken"
    assert "RuntimeError: no pulse" in results[1].found


def test_check_that_hangs_is_a_problem_of_its_own():
    """A check that does not end in time becomes a row, and what it found before stays."""
    release = threading.Event()

    def hangs(_context):
        yield _FINE
        release.wait(60)

    try:
        results = examine(Context.of({}, 1), [hangs, lambda _context: [_HURTS]])
    finally:
        release.set()
    assert [result.status for result in results] == [Status.OK, Status.PROBLEM, Status.WARNING]
    assert "did not finish" in results[1].found


def test_every_check_survives_a_host_without_anything(tmp_path):
    """No check fails where there are no files, no devices and no variables."""
    empty = {"base_dir": tmp_path / "ml", "proc": tmp_path, "sys": tmp_path, "dev": tmp_path}
    context = Context(env={}, ends_at=Context.of({}, 20).ends_at, **empty)
    results = examine(context)
    assert [result for result in results if "check itself" in result.found] == []
    assert len(results) > len(CHECKS) / 2


def test_parallel_calls_return_raise_or_do_not_end():
    """Each call has its own outcome, in the order of the items."""
    release = threading.Event()

    def call(item):
        if item == "hangs":
            release.wait(60)
        if item == "raises":
            raise ValueError(item)
        return item

    try:
        hung, raised, returned = in_parallel(call, ["hangs", "raises", "returns"], 1.0)
    finally:
        release.set()
    assert (hung.value, hung.error, hung.seconds) == (None, None, None)
    assert isinstance(raised.error, ValueError)
    assert returned.value == "returns"
    assert returned.seconds is not None
