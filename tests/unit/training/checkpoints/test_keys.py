"""The keys that lightning_sm adds to checkpoints."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import lightning_sm

PACKAGE = Path(lightning_sm.__file__).parent


def _keys(tree):
    """Yield a file's keys: constants with names that end in KEY and values that start with the package's name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            value = str(node.value.value)
            if value.startswith("lightning_sm.") and all(target.id.endswith("KEY") for target in node.targets):
                yield value


def test_no_two_files_write_the_same_entry():
    """No two files use the same key, or one would read what the other wrote."""
    files = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    keys = Counter(key for tree in files for key in _keys(tree))
    assert len(keys) >= 4
    assert [key for key, number in keys.items() if number > 1] == []
