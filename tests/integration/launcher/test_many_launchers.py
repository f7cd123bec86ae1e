"""Sixteen launchers in one job: all exit with the job, and none floods the log. The scripts do not use torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "launchers.py"
_HOSTS = 16
_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def endings():
    """Results of the benchmark's jobs by name."""
    ended = subprocess.run(
        [sys.executable, str(_BENCHMARK), "--hosts", str(_HOSTS), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return {ending["name"]: ending for ending in json.loads(ended.stdout)}


@pytest.mark.proof  # other tests cover the launchers' decisions with two and three hosts
@pytest.mark.parametrize(
    ("name", "exit_codes"),
    [
        ("success", {"0": 16}),
        ("one script fails", {"7": 1, "143": 15}),
        ("SIGTERM to all hosts", {"143": 16}),
        ("one launcher is killed", {"137": 1, "143": 15}),
    ],
)
def test_all_hosts_end_alike(endings, name, exit_codes):
    """Every launcher exits with the code that the cause implies, and logs at most a dozen lines."""
    ending = endings[name]
    assert ending["exit_codes"] == exit_codes
    assert ending["lines"] <= 12
    assert ending["lines_in_all"] <= _HOSTS * 12
