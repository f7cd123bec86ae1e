"""ARCHITECTURE.md refers to existing folders, files and names."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "lightning_sm"
PAGE = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")


def column_of_table(heading, column):
    """Return the cells of one column of the table below a heading."""
    section = PAGE.partition(f"{heading}\n")[2].partition("\n#")[0]
    return [line.strip("|").split("|")[column] for line in section.splitlines() if line.startswith("|")][2:]


def places(cells):
    """Return each file in the cells with the names that follow it."""
    found = []
    for cell in cells:
        names = []
        for code in re.findall(r"`([\w/.]+)`", cell):
            if re.search(r"/|\.(py|html)$", code):
                names = []
                found.append((code, names))
            else:
                names.append(code)
    return found


def defined_in(file):
    """Yield the names that a file defines: classes, functions, methods, constants and fields."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id


@pytest.mark.parametrize(("name", "names"), places(column_of_table("### Where changes go", 1)))
def test_files_for_typical_changes_define_the_names_that_the_table_mentions(name, names):
    """Each file in the table exists and defines the names in its row."""
    assert (PACKAGE / name).is_file()
    if names:
        assert set(names) <= set(defined_in(PACKAGE / name))


def test_most_rows_mention_a_name():
    """More than half of the rows mention a name; without names, the test above would prove nothing."""
    rows = places(column_of_table("### Where changes go", 1))
    assert len([names for _, names in rows if names]) > len(rows) / 2


def test_every_folder_is_described():
    """Each package has a row, and each row has a package."""
    described = [
        name for cell in column_of_table("## Folders, by who runs them", 0) for name in re.findall("`(.+?)`", cell)
    ]
    found = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/__init__.py")}
    assert {name.split("/")[0] for name in described} >= found
    for name in described:
        assert (PACKAGE / name).is_dir() or (PACKAGE / "data" / name).is_dir()
