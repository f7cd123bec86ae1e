"""Runs Lightning's own tests as they are, and with every loader on a data host, and compares the outcomes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import yaml

_REPOSITORY = Path(__file__).parents[2]
_REASONS = Path(__file__).with_name("differences.yaml")
GROUPS = {
    "loops": ["loops"],
    "data": [
        "trainer/test_dataloaders.py",
        "trainer/connectors/test_data_connector.py",
        "utilities/test_data.py",
        "utilities/test_auto_restart.py",
        "utilities/test_combined_loader.py",
        "core/test_datamodules.py",
    ],
    "callbacks": ["callbacks", "--ignore=callbacks/test_spike.py"],
    "models": ["models/test_hooks.py", "models/test_restore.py", "models/test_cpu.py", "models/test_hparams.py"],
    "logging": ["trainer/logging_"],
    "trainer": ["trainer/test_trainer.py", "trainer/flags", "trainer/optimization", "trainer/properties"],
}


def copy_tests(source: Path, folder: Path) -> Path:
    """Copy Lightning's tests, with the imports of the distribution that is installed.

    Args:
        source: Folder with Lightning's source.
        folder: Where to put them.
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


def run(tests: Path, group: str, plugins: list[str], workers: int) -> dict[str, str]:
    """Run a group; return the outcome of each test.

    Args:
        tests: Folder of the tests.
        group: A key of ``GROUPS``.
        plugins: pytest plugins.
        workers: Processes.
    """
    results = tests.parent / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider"]
    command += [part for plugin in plugins for part in ("-p", plugin)]
    command += [f"--junitxml={results}", "-W", "ignore", "--rootdir", str(tests), *GROUPS[group]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(_REPOSITORY)]), "OMP_NUM_THREADS": "1"}
    with (tests.parent / f"{group}-{len(plugins)}.log").open("w") as log:
        subprocess.run(command, cwd=tests, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    return _outcomes(results)


def _outcomes(results: Path) -> dict[str, str]:
    outcomes = {}
    for case in ET.parse(results).iter("testcase"):  # noqa: S314  # pytest's own file
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        outcomes[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def main() -> None:
    """Run the groups and print a table; exit with 1 if a difference has no reason in differences.yaml."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder with Lightning's source, at the installed version")
    parser.add_argument("--group", choices=GROUPS, action="append", help="default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the tests and logs (default: a temporary one)")
    args = parser.parse_args()
    reasons = yaml.safe_load(_REASONS.read_text()) if _REASONS.is_file() else {}
    unexplained: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        tests = copy_tests(args.source, args.keep or Path(temporary))
        sys.stdout.write(
            "| group | tests | stock pass | remote pass | newly failing | functions |\n|---|---|---|---|---|---|\n"
        )
        for group in args.group or GROUPS:
            stock = run(tests, group, [], args.workers)
            remote = run(tests, group, ["tests.lightning_suite.adapter"], args.workers)
            failing = sorted(
                name for name, outcome in stock.items() if outcome == "passed" and remote.get(name) != "passed"
            )
            functions = sorted({name.partition("[")[0] for name in failing})
            unexplained += [name for name in functions if name.rpartition("::")[2] not in reasons]
            passed = [Counter(outcomes.values())["passed"] for outcomes in (stock, remote)]
            sys.stdout.write(
                f"| {group} | {len(stock)} | {passed[0]} | {passed[1]} | {len(failing)} | {len(functions)} |\n"
            )
            sys.stdout.write("".join(f"    {name}\n" for name in failing))
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"without a reason": unexplained}, indent=1) + "\n")
    sys.exit(bool(unexplained))


if __name__ == "__main__":
    main()
