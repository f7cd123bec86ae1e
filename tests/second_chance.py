"""pytest with a second chance: failed tests run again after all others, one at a time.

Among thousands of tests with real processes, a single busy moment could reject a correct change. A test that fails
twice has found a defect, and so have more failures at once than bad luck explains. Usage, as in the Makefile:
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
# Keep xdist from reordering groups: the tests in containers form the longest group, which must start first.
_PYTEST = (sys.executable, "-m", "pytest", "--dist", "loadgroup", "--no-loadscope-reorder")
# Use one xdist worker even here: xdist adds groups to test names, so without it no name would match the first run's.
_ONLY_FAILED = ("-n", "1", "--last-failed", "--last-failed-no-failures", "none")


def run(arguments: Sequence[str]) -> int:
    """Run tests, and run the failed ones again if they are few.

    Args:
        arguments: Arguments of pytest.

    Returns:
        Exit code of pytest: 0 if each test passed in one of the two runs.
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
        results: File that pytest's ``--junitxml`` has written.
    """
    errors: dict[str, str] = {}
    for case in ET.parse(results).iter("testcase"):  # noqa: S314 (pytest wrote it)
        for problem in (*case.iterfind("failure"), *case.iterfind("error")):
            message = problem.get("message", "").strip()
            # xdist appends "@" and the test's group. An "@" before the last bracket belongs to a parameter.
            name = re.sub(r"@[^\]]*$", "", case.get("name", ""))
            errors.setdefault(f"{case.get('classname')}::{name}", message.partition("\n")[0])
    return errors


def _say(text: str, errors: Mapping[str, str]) -> None:
    lines = [f"  {name}: {error}" for name, error in errors.items()]
    sys.stdout.write("\n".join(["", text, *lines, ""]))
    sys.stdout.flush()


if __name__ == "__main__":
    # Ignore Ctrl-C here: pytest receives it, too, and needs seconds to stop the processes of its tests.
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.exit(run(sys.argv[1:]))
