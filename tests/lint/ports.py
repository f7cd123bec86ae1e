"""No test looks up a free port and binds it later: meanwhile, another process can take it.

A test keeps the socket open that has the port, or takes the ports of a job that it has reserved
(``tests.fakes.reserved_job``).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def ports_bound_later(folder: Path) -> list[str]:
    """Find ports that are read from a socket which is closed at once.

    Args:
        folder: Folder of Python files.

    Returns:
        ``file:line`` of each ``with`` statement that opens a socket and only reads its port.
    """
    return [
        f"{path}:{node.lineno}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.With) and _only_reads_the_port(node)
    ]


def _only_reads_the_port(node: ast.With) -> bool:
    opens = any(_calls(item.context_expr, {"socket", "create_server"}) for item in node.items)
    *before, last = node.body
    reads = isinstance(last, (ast.Assign, ast.Return)) and _calls(last, {"getsockname"})
    return opens and reads and all(isinstance(one, ast.Expr) and _calls(one, {"bind", "setsockopt"}) for one in before)


def _calls(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr in names for one in ast.walk(node))


def main() -> int:
    """Print the places; exit with 1 if there are any."""
    places = ports_bound_later(Path("tests"))
    for place in places:
        sys.stderr.write(
            f"{place}: looks up a free port, which another process can take before it is used. Keep the socket open, "
            "or reserve the ports of a job: tests.fakes.reserved_job.\n"
        )
    return bool(places)


if __name__ == "__main__":
    sys.exit(main())
