"""Lint check that no test or benchmark looks up a free port and binds it later: another process could take it first.

Instead, keep the socket of the port open, or reserve the ports of a job (``tests.fakes.reserved_job``).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_OPENS = {"socket", "create_server"}
# Calls that only look up a port. Any other call may use the port.
_LOOKUP = _OPENS | {"bind", "setsockopt", "listen", "getsockname", "close", "int", "str"}


def ports_bound_later(folder: Path) -> list[str]:
    """Find code that reads a port from a socket and closes the socket before anything uses the port.

    Args:
        folder: Folder of Python files.

    Returns:
        ``file:line`` of each statement that opens such a socket.
    """
    return [
        f"{path}:{line}"
        for path in sorted(folder.rglob("*.py"))
        for line in sorted(_lookups(ast.parse(path.read_text(encoding="utf-8"))))
    ]


def _lookups(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and _opens(*node.items) and _only_looks_up(node.body):
            yield node.lineno
        for _, block in ast.iter_fields(node):
            for index, stmt in enumerate(block if isinstance(block, list) else [], 1):
                if isinstance(stmt, ast.Assign) and _opens(stmt) and _only_looks_up(_until_closed(block[index:])):
                    yield stmt.lineno


def _opens(*nodes: ast.AST) -> bool:
    return bool(_OPENS & _called(nodes))


def _until_closed(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements up to the one that closes a socket, or none if no statement does."""
    return next((statements[: index + 1] for index, one in enumerate(statements) if "close" in _called([one])), [])


def _only_looks_up(statements: list[ast.stmt]) -> bool:
    called = _called(statements)
    return "getsockname" in called and called <= _LOOKUP


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of all called functions and methods, without the objects of the methods."""
    calls = (one.func for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call))
    return {call.attr if isinstance(call, ast.Attribute) else ast.unparse(call) for call in calls}


def main() -> int:
    """Print the places, and return 1 if there are any."""
    places = [place for folder in ("tests", "benchmarks") for place in ports_bound_later(Path(folder))]
    for place in places:
        sys.stderr.write(
            f"{place}: looks up a free port, which another process can take before it is used. Keep the socket open, "
            "or reserve the ports of a job: tests.fakes.reserved_job.\n"
        )
    return bool(places)


if __name__ == "__main__":
    sys.exit(main())
