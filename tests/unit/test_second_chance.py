"""The second chance of failed tests: tests that fail once, always, or in large numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.second_chance import first_errors

REPOSITORY = Path(__file__).parents[2]
_FAILS_ONCE = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range({number}))
def test_fails_once(number):
    mark = pathlib.Path(__file__).with_name(f"ran-{{number}}")
    if not mark.exists():
        mark.touch()
        raise RuntimeError("a busy moment")
"""


def _run(folder, number_once, others=""):
    tests = _FAILS_ONCE.format(number=number_once) + others
    (folder / "test_all.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]")
    # Groups change the names of tests in xdist workers, as in the suite itself.
    groups = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_collection_modifyitems(items):\n"
    groups += "    for item in items:\n        item.add_marker(pytest.mark.xdist_group('file/name.py'))\n"
    (folder / "conftest.py").write_text(groups)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    only_xdist = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}  # other plugins take seconds
    return subprocess.run(
        [sys.executable, "-m", "tests.second_chance", "-n", "1", "--rootdir", folder, folder],
        cwd=REPOSITORY,
        env={**env, **only_xdist},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_tests_that_fail_once_pass_and_are_listed(tmp_path):
    """The last lines list each test with its first error, and passed tests do not run again."""
    passing = "\ndef test_passes():\n    with open(pathlib.Path(__file__).with_name('passed'), 'a') as file:\n"
    passing += "        file.write('x')\n"
    ended = _run(tmp_path, 5, passing)
    assert ended.returncode == 0, ended.stdout
    *_, title, first, _, _, _, _ = ended.stdout.splitlines()
    assert title == "Passed. Flaky, because they failed at first and passed alone: 5."
    assert first.endswith("test_all::test_fails_once[0]: RuntimeError: a busy moment")
    assert (tmp_path / "passed").read_text() == "x"


def test_tests_are_named_without_their_groups(tmp_path):
    """The group after the last @ is removed, but an @ in a parameter is kept."""
    results = tmp_path / "results.xml"
    names = ("test_a@unit/file.py", "test_b[kill@step=1]@unit/file.py", "test_c[kill@step=1]", "test_d")
    cases = (f'<testcase classname="m" name="{name}"><failure message="wrong"/></testcase>' for name in names)
    results.write_text(f"<testsuites>{''.join(cases)}</testsuites>")
    assert list(first_errors(results)) == ["m::test_a", "m::test_b[kill@step=1]", "m::test_c[kill@step=1]", "m::test_d"]


def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    """A test that fails twice fails the run, even if others pass."""
    ended = _run(tmp_path, 1, "\ndef test_always_fails():\n    assert 1 == 2\n")
    assert ended.returncode == 1, ended.stdout
    assert "1 failed, 1 passed" in ended.stdout


def test_six_failures_get_no_second_chance(tmp_path):
    """Six failures at once are not bad luck, so no test runs again."""
    ended = _run(tmp_path, 6)
    assert ended.returncode == 1, ended.stdout
    assert ended.stdout.count("test session starts") == 1
