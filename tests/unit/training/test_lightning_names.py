"""Lightning's names, as lightning_sm passes them on."""

from __future__ import annotations

import ast
import inspect

from lightning_sm import _lightning


def test_type_checkers_and_python_see_the_same_names():
    """The imports of the one and the table of the other name the same classes and functions."""
    tree = ast.parse(inspect.getsource(_lightning))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    checked = {alias.asname or alias.name for node in block.body for alias in node.names}
    loaded = {name.lstrip("_") for names in _lightning._NAMES.values() for name in names.split()}
    assert checked == loaded
    assert all(hasattr(_lightning, name) for name in loaded)
