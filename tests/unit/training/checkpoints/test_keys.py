"""The entries of checkpoints."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import lightning_sm

PACKAGE = Path(lightning_sm.__file__).parent


def _keys(tree):
    """The entries that a file names: constants whose names end in KEY, with the package's name in front."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            value = str(node.value.value)
            if value.startswith("lightning_sm.") and all(target.id.endswith("KEY") for target in node.targets):
                yield value


def test_no_two_files_write_the_same_entry():
    """Each would read what the other has written: entries are named after what they hold."""
    files = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    keys = Counter(key for tree in files for key in _keys(tree))
    assert len(keys) >= 4
    assert [key for key, number in keys.items() if number > 1] == []
