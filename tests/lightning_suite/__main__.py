"""Run Lightning's own tests unchanged and with every loader on a data host, and compare the outcomes."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import yaml

_REPOSITORY = Path(__file__).parents[2]
_REASONS = Path(__file__).with_name("differences.yaml")
_ADAPTER = "tests.lightning_suite.adapter"
PROPERTY = "runs_on_data_hosts"
_NO_SPAWN = "tests.lightning_suite.no_spawn"
GROUPS = {
    "data": [
        "trainer/test_dataloaders.py",
        "trainer/connectors/test_data_connector.py",
        "utilities/test_data.py",
        "utilities/test_auto_restart.py",
        "utilities/test_combined_loader.py",
        "core/test_datamodules.py",
    ],
    "loops": ["loops"],
    "models": ["models/test_hooks.py", "models/test_restore.py", "models/test_cpu.py", "models/test_hparams.py"],
    "trainer": [
        "trainer/test_trainer.py",
        "trainer/test_states.py",
        "trainer/test_config_validator.py",
        "trainer/flags",
        "trainer/optimization",
        "trainer/properties",
    ],
    "callbacks": ["callbacks", "--ignore=callbacks/test_spike.py"],
    "logging": ["trainer/logging_"],
}


@dataclass(frozen=True)
class Reasons:
    """Reasons why tests fail with data hosts.

    Attributes:
        texts: Reasons by the names of test functions, ``FILE::FUNCTION``.
    """

    texts: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Reasons:
        """Read a YAML list of reasons, each with its test functions."""
        entries = yaml.safe_load(path.read_text()) or []
        texts = {test: str(entry["reason"]) for entry in entries for test in entry["tests"]}
        num_tests = sum(len(entry["tests"]) for entry in entries)
        if len(texts) != num_tests:
            raise SystemExit(f"{path} has a test twice.")
        return cls(texts)


@dataclass
class Group:
    """The outcomes of a group of tests.

    Attributes:
        name: Name of the group.
        stock: "passed", "failed" or "skipped", by test, with stock Lightning.
        remote: "passed", "failed" or "skipped", by test, with data hosts.
        num_runs: Number of Trainer runs (``fit``, ``validate`` and so on) with loaders on a data host.
        seconds: Duration of both runs of the group.
    """

    name: str
    stock: dict[str, str]
    remote: dict[str, str]
    num_runs: int
    seconds: float
    failing: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.failing = sorted(
            name for name, outcome in self.stock.items() if outcome == "passed" and self.remote.get(name) != "passed"
        )

    @property
    def functions(self) -> list[str]:
        """Test functions that fail only with data hosts."""
        return sorted({_function(name) for name in self.failing})

    def unexplained(self, reasons: Reasons) -> list[str]:
        """Return the failing functions that have no reason."""
        return [name for name in self.functions if name not in reasons.texts]

    def stale(self, reasons: Reasons) -> list[str]:
        """Return the functions that have a reason but do not fail."""
        ran = {_function(name) for name in self.stock}
        return sorted((ran & set(reasons.texts)) - set(self.functions))

    def row(self) -> str:
        """Return a row of the table."""
        passed = [Counter(outcomes.values())["passed"] for outcomes in (self.stock, self.remote)]
        cells = [self.name, len(self.stock), *passed, len(self.failing), len(self.functions), self.num_runs]
        return f"| {' | '.join(map(str, cells))} | {self.seconds:.0f} |"


def _function(test: str) -> str:
    return test.partition("[")[0]


def copy_tests(source: Path, folder: Path) -> Path:
    """Copy Lightning's tests, changing their imports to the installed distribution.

    Args:
        source: Folder with Lightning's source.
        folder: Folder for the copy.
    """
    tests = source / "tests" / "tests_pytorch"
    if not (tests / "conftest.py").is_file():
        raise SystemExit(f"{source} is no source of Lightning: there is no {tests / 'conftest.py'}.")
    for path in tests.rglob("*.py"):
        text = path.read_text()
        text = re.sub(r"\blightning\.pytorch\b", "pytorch_lightning", text)
        text = re.sub(r"\blightning\.fabric\b", "lightning_fabric", text)
        target = folder / "tests_pytorch" / path.relative_to(tests)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder / "tests_pytorch"


@dataclass(frozen=True)
class Suite:
    """Lightning's tests.

    Attributes:
        tests: Folder of the tests.
        workers: Number of pytest-xdist processes.
        plugins: Names of pytest plugins to load.
    """

    tests: Path
    workers: int
    plugins: tuple[str, ...]

    def run(self, selected: Sequence[str], name: str, *, is_remote: bool) -> ET.Element:
        """Run tests, and return pytest's report.

        Args:
            selected: Arguments of pytest that select the tests.
            name: Name of the log file, which is written beside the folder of the tests.
            is_remote: Whether to use data hosts.
        """
        log = self.tests.parent / f"{name}.log"
        results = log.with_suffix(".xml")
        results.unlink(missing_ok=True)
        plugins = (*self.plugins, _ADAPTER) if is_remote else self.plugins
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(self.workers), "-p", "no:cacheprovider"]
        command += [part for plugin in plugins for part in ("-p", plugin)]
        command += [f"--junitxml={results}", "-W", "ignore", "--rootdir", str(self.tests), *selected]
        paths = os.pathsep.join([str(self.tests.parent), str(_REPOSITORY)])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            subprocess.run(command, cwd=self.tests, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
        if not results.is_file():
            raise SystemExit(f"pytest left no results:\n{log.read_text()[-2000:]}")
        return ET.parse(results).getroot()  # noqa: S314  # pytest's own file

    def run_group(self, name: str) -> Group:
        """Run a group both ways.

        Args:
            name: A key of ``GROUPS``.
        """
        began = time.monotonic()
        stock = self.run(GROUPS[name], f"{name}-stock", is_remote=False)
        remote = self.run(GROUPS[name], f"{name}-remote", is_remote=True)
        runs = [int(each.get("value", "")) for each in remote.iterfind(f".//property[@name='{PROPERTY}']")]
        return Group(name, _outcomes(stock), _outcomes(remote), sum(runs), time.monotonic() - began)


def _outcomes(report: ET.Element) -> dict[str, str]:
    outcomes = {}
    for case in report.iter("testcase"):
        path, _, cls = str(case.get("classname", "")).removeprefix("tests_pytorch.").partition(".Test")
        name = f"{path.replace('.', '/')}.py::{f'Test{cls}::' if cls else ''}{case.get('name')}"
        kinds = {child.tag for child in case}
        outcomes[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def main() -> None:
    """Run the groups and print a table.

    Exit with 1 if a test fails without a reason in differences.yaml, or passes although it has one.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder with Lightning's source, at the installed version")
    parser.add_argument("--group", choices=GROUPS, action="append", help="group to run (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the tests and logs (default: a temporary one)")
    parser.add_argument("--no-spawn", action="store_true", help="skip the tests that spawn processes")
    args = parser.parse_args()
    reasons = Reasons.read(_REASONS)
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as temporary:
        tests = copy_tests(args.source.resolve(), args.keep or Path(temporary))
        suite = Suite(tests, args.workers, (_NO_SPAWN,) if args.no_spawn else ())
        sys.stdout.write(f"{_versions(args.source)}\n\n")
        _write_row("group", "tests", "stock pass", "remote pass", "newly failing", "functions", "runs", "seconds")
        _write_row(*["---"] * 8)
        for name in args.group or GROUPS:
            group = suite.run_group(name)
            groups.append(group)
            sys.stdout.write(f"{group.row()}\n")
            sys.stdout.flush()
    counts = Counter(reasons.texts.get(_function(name)) for group in groups for name in group.failing)
    sys.stdout.write("".join(f"{count} tests: {reason}\n" for reason, count in counts.most_common()))
    unexplained = [name for group in groups for name in group.unexplained(reasons)]
    stale = [name for group in groups for name in group.stale(reasons)]
    sys.stdout.write(f"without a reason: {unexplained}\nwith a reason, but they pass: {stale}\n")
    sys.exit(bool(unexplained or stale))


def _versions(source: Path) -> str:
    info = source / "src" / "version.info"
    of_tests = info.read_text().strip() if info.is_file() else "unknown"
    packages = ", ".join(f"{name} {version(name)}" for name in ("pytorch-lightning", "torch"))
    today = dt.datetime.now(dt.timezone.utc).date()
    return f"{today}: {packages}, Python {platform.python_version()}; tests of Lightning {of_tests}"


def _write_row(*cells: Any) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")


if __name__ == "__main__":
    main()
