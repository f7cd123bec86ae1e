"""Lint check that each class name exists only once in the package, so that a search for it finds one class.

Names that differ only in a leading underscore, such as ``_Host`` and ``Host``, count as the same.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path


def repeated_class_names(package: Path) -> Mapping[str, list[str]]:
    """Find class names that are defined more than once.

    Args:
        package: Folder of the package.

    Returns:
        ``file:line`` of each definition, by name without leading underscores.
    """
    places = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    return {name: lines for name, lines in sorted(places.items()) if len(lines) > 1}


def main() -> int:
    """Print the repeated names, and return 1 if there are any."""
    repeated = repeated_class_names(Path("lightning_sm"))
    for name, places in repeated.items():
        sys.stderr.write(f"class {name} is defined {len(places)} times; rename all but one: {', '.join(places)}\n")
    return bool(repeated)


if __name__ == "__main__":
    sys.exit(main())
