"""What kind of script the launcher starts, from its text: which parser reads its command line."""

from __future__ import annotations

import ast
from enum import Enum
from pathlib import Path

from lightning_sm.launcher.user_code.script import Script

_CLI = "SageMakerCLI"
# Modules that read the command line, too: a script with one of them may need all of its arguments.
_OTHER_PARSERS = frozenset(
    [
        "absl",
        "argh",
        "argparse",
        "cleo",
        "click",
        "docopt",
        "fire",
        "getopt",
        "hydra",
        "jsonargparse",
        "optparse",
        "plac",
        "simple_parsing",
        "tap",
        "typer",
        "tyro",
    ]
)


class Parser(Enum):
    """The parser of a script's command line."""

    SAGEMAKER_CLI = "SageMakerCLI"
    HYDRA = "Hydra"
    OTHER = "another parser, or unknown"


def parser_of(script: Script) -> Parser:
    """Return which parser reads the command line of a script.

    Only what the script's own file says counts, and only if it is certain. For Hydra, a function is decorated by
    ``hydra.main``. For the CLI, the script calls ``SageMakerCLI``, or a class that it derives from it, without
    arguments of its own, and names no other reader of the command line.

    Args:
        script: The script.
    """
    if not script.is_python:
        return Parser.OTHER
    try:
        tree = ast.parse(_file(script).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # Python will say what is wrong
        return Parser.OTHER
    facts = _Facts()
    facts.visit(tree)
    if facts.is_hydra:
        return Parser.HYDRA
    return Parser.SAGEMAKER_CLI if facts.calls_cli and not facts.has_other else Parser.OTHER


def _file(script: Script) -> Path:
    *_, option, last = script.command
    return script.directory / f"{last.replace('.', '/')}.py" if option == "-m" else Path(last)


class _Facts(ast.NodeVisitor):
    """The facts of a file that tell how its command line is read."""

    def __init__(self) -> None:
        self.calls_cli = False
        self.has_other = False
        self.is_hydra = False
        self._mains: set[str] = set()  # names of hydra and of hydra.main
        self._packages: set[str] = set()  # names of lightning_sm
        self._classes: set[str] = set()  # names of SageMakerCLI, and of classes that derive from it

    def visit_Import(self, node: ast.Import) -> None:
        """Note names of the package, and of other parsers."""
        for name in node.names:
            top = name.name.partition(".")[0]
            self.has_other |= top in _OTHER_PARSERS
            if top == "lightning_sm":
                self._packages.add(name.asname or top)
            if name.name == "hydra":
                self._mains.add(f"{name.asname or top}.main")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Note names of the class, and of other parsers."""
        top = (node.module or "").partition(".")[0] if not node.level else ""
        self.has_other |= top in _OTHER_PARSERS
        for name in node.names:
            if top == "lightning_sm" and name.name == _CLI:
                self._classes.add(name.asname or name.name)
            self.has_other |= top == "sys" and name.name == "argv"
            if (node.module, name.name) in (("hydra", "main"), ("hydra.main", "main")):
                self._mains.add(name.asname or name.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note a function that Hydra calls."""
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            self.is_hydra |= ast.unparse(called) in self._mains
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Note classes that derive from it."""
        if any(map(self._is_cli, node.bases)):
            self._classes.add(node.name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note that the script reads its arguments itself."""
        self.has_other |= node.attr == "argv"
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Note a call of the class."""
        if self._is_cli(node.func):
            self.calls_cli = True
            # ``args=`` replaces the command line, and ``**settings`` may hold it.
            self.has_other |= any(keyword.arg in ("args", None) for keyword in node.keywords)
        self.generic_visit(node)

    def _is_cli(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._classes
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return False
        return node.attr == _CLI and node.value.id in self._packages
