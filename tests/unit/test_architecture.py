"""ARCHITECTURE.md names folders and files that exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "lightning_sm"
PAGE = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")


def first_cells(heading, column):
    """The code in one column of the table below a heading."""
    section = PAGE.partition(f"{heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return [name for row in rows for name in re.findall(r"`([\w/.]+)`", row[column])]


@pytest.mark.parametrize("name", first_cells("### Where changes go", 1))
def test_files_for_typical_changes_exist(name):
    """Whoever follows the table finds the file."""
    assert (PACKAGE / name).is_file()


def test_every_folder_is_described():
    """Each package has a row, and each row has a package."""
    described = first_cells("## Folders, by who runs them", 0)
    found = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/__init__.py")}
    assert {name.split("/")[0] for name in described} >= found
    for name in described:
        assert (PACKAGE / name).is_dir() or (PACKAGE / "data" / name).is_dir()
