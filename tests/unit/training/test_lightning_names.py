"""The names that lightning_sm re-exports from Lightning."""

from __future__ import annotations

import ast
import inspect

from lightning_sm import _lightning


def test_type_checkers_and_python_see_the_same_names():
    """The imports for type checkers and the table for Python contain the same names."""
    tree = ast.parse(inspect.getsource(_lightning))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    checked = {alias.asname or alias.name for node in block.body for alias in node.names}
    loaded = {name.lstrip("_") for names in _lightning._NAMES.values() for name in names.split()}
    assert checked == loaded
    assert all(hasattr(_lightning, name) for name in loaded)
