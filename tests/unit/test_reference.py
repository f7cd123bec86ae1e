"""The generated reference (docs/reference.py): complete, and in the words of its readers."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from lightning_sm.job.variables import SETTINGS
from lightning_sm.submit.job_file import Group, Job
from lightning_sm.submit.job_keys import keys_of

REFERENCE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "reference.py"))


def rows(text):
    """The cells of all tables of a page, by their first cell without its markup."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_each_command_has_its_help_text():
    """Whatever parses a command, its section has its usage and its options; commands within commands are found."""
    names = REFERENCE["command_names"]()
    assert {"train", "local", "submit"} <= {words[0] for words in names}
    assert ["jobs", "logs"] in names
    sections = dict(
        re.findall(r"^## (lightning-sm [^\n]*)\n\n```text\n(.*?)^```$", REFERENCE["commands"](), re.M | re.S)
    )
    assert list(sections) == [f"lightning-sm {' '.join(words)}" for words in names]
    for name, text in sections.items():
        assert text.startswith(f"usage: {name}")
        assert re.search(r"^options:$", text, re.MULTILINE), name


def test_settings_are_those_that_users_set():
    """Each in the table with its default and meaning; variables of our own processes are not."""
    shown = rows(REFERENCE["settings"]())
    assert shown == {one.name: [one.default_text, one.meaning] for one in SETTINGS if not one.is_internal}


def test_job_file_has_all_keys():
    """Those of the file and those of its parts, with type, default and a meaning in words."""
    of_job, group = REFERENCE["job_file"]().split("\n## ")[:2]
    shown = rows(of_job)
    assert list(shown) == list(keys_of(Job))
    assert group.startswith("Group\n")
    assert list(rows(group)) == list(keys_of(Group))
    assert all(len(cells) == 3 and all(cells) for cells in shown.values())
    assert shown["image"][:2] == ["text", "**required**"]
    assert shown["groups"][:2] == ["`{name: value}`, each value: [Group](#group)", "**required**"]
    assert shown["volume_gb"][:2] == ["whole number", "`30`"]
    assert shown["request"][:2] == ["`{name: value}`, each value: any", "none"]
    assert shown["role"][:2] == ["text", "none"]


@pytest.mark.filterwarnings("ignore")  # of the SageMaker SDK, from which a public name is derived
@pytest.mark.parametrize("name", REFERENCE["GENERATED"])
def test_the_pages_in_the_repository_have_what_is_generated_today(name):
    """Readers of the repository see commands, variables, keys and names as the code has them."""
    page = (REFERENCE["FOLDER"] / f"{name}.md").read_text(encoding="utf-8")
    assert f"<!-- generated: {name} -->" in page
    assert page == REFERENCE["complete"](page), "run: python docs/reference.py"


def test_long_signatures_have_several_parameters_on_a_line():
    """As many as fit, each whole."""
    page = (REFERENCE["FOLDER"] / "python.md").read_text(encoding="utf-8")
    signature = re.search(r"^DataHost\(\n(.*?)^\)$", page, re.M | re.S)
    assert signature is not None
    lines = signature[1].splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if not line.startswith("    ") or not line.endswith(",")] == []
    assert lines[0].lstrip().startswith("address: str = '127.0.0.1:0', workers: int = 2, *,")
