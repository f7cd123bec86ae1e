"""Changes the pure rules one by one, and lists the changes that no test of the module notices."""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.run import Module, run

_MODULES = Path(__file__).with_name("modules.yaml")
_SURVIVORS = Path(__file__).with_name("survivors.yaml")
_LEAST_KILLED = 0.95


class Change(NamedTuple):
    """What a mutant changes.

    Attributes:
        where: The function, or the class.
        was: The lines that it changes, or removes.
        now: The lines in their place.
    """

    where: str
    was: str
    now: str


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: A survivor is not listed, one that is listed did not survive, or too few were killed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="only modules whose paths have one of these in them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants at a time (default: one per core)")
    args = parser.parse_args(argv)
    modules = [Module(path, tests) for path, tests in yaml.safe_load(_MODULES.read_text(encoding="utf-8")).items()]
    chosen = [one for one in modules if not args.parts or any(part in one.path for part in args.parts)]
    if not chosen:
        raise SystemExit(f"No module in {_MODULES} has one of {args.parts} in its path.")
    _print("| module | mutants | killed | equivalent | others | killed of those that are not equivalent | s |")
    _print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as compiled:
        # Every process imports the other modules anew; a mutant itself is never written.
        sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
        num_problems = sum(_test(module, args.workers) for module in chosen)
    raise SystemExit(1 if num_problems else 0)


def _test(module: Module, workers: int) -> int:
    """Run the mutants of a module, print a row, and what the list of survivors lacks or has too much; count that."""
    began = time.monotonic()
    equivalent, missed = _listed(module.path, "equivalent"), _listed(module.path, "missed")
    found = run(module, mutants_of(module.source), workers)
    changes = Counter(_change(module.source, mutant) for mutant in found.survivors)
    num_equivalent = (changes & equivalent).total()
    num_killed = found.num_mutants - changes.total()
    share = num_killed / max(1, found.num_mutants - num_equivalent)
    others = changes.total() - num_equivalent
    cells = [module.path, found.num_mutants, num_killed, num_equivalent, others, f"{share:.1%}"]
    _print(f"| {' | '.join(map(str, cells))} | {time.monotonic() - began:.0f} |")
    listed = equivalent + missed
    problems = [
        f"{module.path}: {what}:\n{_yaml([change._asdict() for change in sorted(some.elements())])}"
        for what, some in (
            ("survivors that are not listed", changes - listed),
            ("listed, but killed or gone", listed - changes),
        )
        if some
    ]
    if share < _LEAST_KILLED:
        problems.append(f"{module.path}: {share:.1%} are killed, fewer than {_LEAST_KILLED:.0%}.\n")
    sys.stderr.write("".join(problems))
    sys.stderr.flush()
    return len(problems)


def _listed(path: str, kind: str) -> Counter[Change]:
    """Return the survivors of a module that are listed with a reason of a kind, ``equivalent`` or ``missed``."""
    entries = yaml.safe_load(_SURVIVORS.read_text(encoding="utf-8")).get(path, ())
    return Counter(Change(entry["where"], entry["was"], entry["now"]) for entry in entries if entry.get(kind))


def _change(source: str, mutant: Mutant) -> Change:
    before, after = source.splitlines(), mutant.code(source).splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    (first, stop, start, end) = next(places for kind, *places in matcher.get_opcodes() if kind != "equal")
    return Change(_where(source, first + 1), _joined(before[first:stop]), _joined(after[start:end]))


def _joined(lines: Sequence[str]) -> str:
    return " ".join(line.strip() for line in lines)


def _where(source: str, line: int) -> str:
    """Return the qualified name of the innermost function or class that has a line."""
    names: list[str] = []
    node: Any = ast.parse(source)
    while node is not None:
        inner = (one for one in ast.walk(node) if one is not node and isinstance(one, (ast.FunctionDef, ast.ClassDef)))
        node = next((one for one in inner if one.lineno <= line <= (one.end_lineno or 0)), None)
        if node is not None:
            names.append(node.name)
    return ".".join(names) or "module"


def _yaml(entries: Sequence[dict[str, str]]) -> str:
    return str(yaml.safe_dump(list(entries), sort_keys=False, width=1000, allow_unicode=True))


def _print(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
