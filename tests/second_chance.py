"""pytest with a second chance: tests that fail run once more after all others, alone, one after the other.

Among thousands of tests with real processes, one that meets a busy moment would refuse a change that is right. What
fails twice is a defect, and so are more failures at once than bad luck explains. Usage, as the Makefile does it:
``python -m tests.second_chance PYTEST-ARGUMENTS``.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

MAX_FLAKY = 5
# The tests in containers form one group, which takes longest and so starts before the other groups.
_PYTEST = (sys.executable, "-m", "pytest", "--dist", "loadgroup", "--no-loadscope-reorder")
# With one worker of xdist, because xdist adds their groups to the names of the tests that it reports.
_ONLY_FAILED = ("-n", "1", "--last-failed", "--last-failed-no-failures", "none")


def run(arguments: Sequence[str]) -> int:
    """Run tests, and those that failed once more if they are few.

    Args:
        arguments: Arguments of pytest.

    Returns:
        Exit code of pytest: 0 if each test passed in one of both runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache = ("-o", f"cache_dir={folder}/cache")
        results = Path(folder, "first.xml")
        code = subprocess.call([*_PYTEST, *cache, f"--junitxml={results}", *arguments])
        if code != pytest.ExitCode.TESTS_FAILED:
            return code
        errors = first_errors(results)
        if len(errors) > MAX_FLAKY:
            _say(f"{len(errors)} tests failed. Only up to {MAX_FLAKY} get a second chance.", errors)
            return code
        _say("These tests failed, and run once more, alone:", errors)
        code = subprocess.call([*_PYTEST, *cache, *arguments, *_ONLY_FAILED])
    if code:
        _say("Not every one of these tests passed when it ran once more, alone:", errors)
    else:
        _say(f"Passed. Flaky, because they failed at first and passed alone: {len(errors)}.", errors)
    return code


def first_errors(results: Path) -> Mapping[str, str]:
    """Return the first line of each failed test's first error, by name of the test.

    Args:
        results: What pytest's ``--junitxml`` has written.
    """
    errors: dict[str, str] = {}
    for case in ET.parse(results).iter("testcase"):  # noqa: S314 (pytest wrote it)
        for problem in (*case.iterfind("failure"), *case.iterfind("error")):
            message = problem.get("message", "").strip()
            # xdist appends the test's group. An @ before the last bracket is of a parameter.
            name = re.sub(r"@[^\]]*$", "", case.get("name", ""))
            errors.setdefault(f"{case.get('classname')}::{name}", message.partition("\n")[0])
    return errors


def _say(text: str, errors: Mapping[str, str]) -> None:
    lines = [f"  {name}: {error}" for name, error in errors.items()]
    sys.stdout.write("\n".join(["", text, *lines, ""]))
    sys.stdout.flush()


if __name__ == "__main__":
    # pytest gets Ctrl-C, too, and takes seconds to end what its tests have started.
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.exit(run(sys.argv[1:]))
