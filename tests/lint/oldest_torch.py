"""Check that the oldest supported torch has every name that the package imports from torch at load time.

    python -m tests.lint.oldest_torch

Run this with the oldest torch. It writes ``tests/records/oldest_torch.txt``, to which a test compares the package's
imports, because no newer torch would reveal a missing name. Imports inside functions are ignored.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
RECORD = _ROOT / "tests" / "records" / "oldest_torch.txt"


def oldest() -> str:
    """Return the oldest version of torch that the package accepts."""
    match = re.search(r'"torch>=([\d.]+)', (_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if match is None:
        raise ValueError("pyproject.toml has no lower bound for torch, such as torch>=2.6.")
    return match[1]


def imported_names() -> list[str]:
    """Return the imported names, such as ``torch.distributed.ProcessGroup``, sorted."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (_ROOT / "lightning_sm").rglob("*.py"))
    return sorted({name for tree in trees for name in _names(tree)})


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_for_types(child):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "torch":
            yield from (f"{child.module}.{name.name}" for name in child.names)
        elif isinstance(child, ast.Import):
            yield from (name.name for name in child.names if name.name.split(".")[0] == "torch")
        else:
            yield from _names(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        return bool(module) and hasattr(importlib.import_module(module), attribute)
    return True


def main() -> int:
    """Write the record, and return the number of missing names."""
    import torch

    version = torch.__version__.partition("+")[0]
    if not f"{version}.".startswith(f"{oldest()}."):
        sys.exit(f"This is torch {version}. Install {oldest()}, the oldest version that the package accepts.")
    missing = [name for name in imported_names() if not _exists(name)]
    for name in missing:
        sys.stderr.write(f"torch {version} has no {name}: import it where it is used.\n")
    if not missing:
        RECORD.write_text("\n".join([f"torch {version}", *imported_names()]) + "\n", encoding="utf-8")
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
