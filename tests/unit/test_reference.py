"""The generated reference (docs/reference.py) is complete and written for its readers."""

from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path

import pytest

from lightning_sm import __main__ as program
from lightning_sm.job.variables import (
    CONTROL_DIR,
    DATA_CHANNELS,
    HANG_S,
    HIDDEN_OPTIONS,
    HOST_FOLDER,
    MAX_RESTARTS,
    RANK_ZERO_PID,
    RECORD_DIR,
    SEPARATE_HOSTS,
    SETTINGS,
    USER_SETTINGS,
)
from lightning_sm.submit.dataclass_fields import all_keys
from lightning_sm.submit.job_file import Job

REFERENCE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "reference.py"))


def rows(text):
    """Return the cells of all tables of a page, by their first cell without its markup."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].replace("`", ""): row[1:] for row in cells}


def options(invocations):
    """Return the names of options in the first column."""
    return {name for one in invocations for name in re.findall(r"(?<![\w-])--?[a-z][\w-]*", one)}


def test_each_command_has_the_options_of_its_help(capsys, monkeypatch):
    """Each command's section has its usage and its options, including commands within commands."""
    monkeypatch.setenv("NO_COLOR", "1")
    sections = dict(re.findall(r"^## (lightning-sm [^\n]*)\n\n(.*?)(?=^## |\Z)", REFERENCE["commands"](), re.M | re.S))
    names = {name for name in program._HELP if name != "jobs"}
    names |= {f"jobs {name}" for name in ("list", "logs", "stop", "report", "again")}
    assert set(sections) == {f"lightning-sm {name}" for name in names}
    for name, text in sections.items():
        assert re.match(rf"[A-Z][^\n]*\.\n\n`{name}\b", text), name
        with contextlib.suppress(SystemExit):
            program.main([*name.split()[1:], "--help"])
        shown, _, keys = capsys.readouterr().out.partition("keys of the job file")
        assert bool(keys) == ("job-file.md" in text), name
        assert options(rows(text)) == options(re.findall(r"^  (-.*?)(?:  |$)", shown, re.M)) - {"-h", "--help"}, name


def test_settings_are_those_that_users_set():
    """The table has the default and meaning of each setting for users, and no internal variables."""
    shown = rows(REFERENCE["settings"]())
    internal = (CONTROL_DIR, RANK_ZERO_PID, HOST_FOLDER, RECORD_DIR, DATA_CHANNELS, HIDDEN_OPTIONS)
    assert list(shown) == [one.name for one in SETTINGS if one not in internal]
    for setting in USER_SETTINGS:
        default, meaning = shown[setting.name]
        assert meaning == setting.meaning
        assert default == setting.default_text or setting.parse(default) == setting.default
    assert [shown[one.name][0] for one in (HANG_S, MAX_RESTARTS, SEPARATE_HOSTS)] == ["1200", "0", "0"]
    assert all(all(cells) for cells in shown.values())


def test_job_file_has_all_keys():
    """All keys at all levels are listed with type, default and meaning."""
    shown = rows(REFERENCE["job_file"]())
    assert list(shown) == [".".join(path.parts) for path in all_keys(Job)]
    assert all(len(cells) == 3 and all(cells) for cells in shown.values())
    assert shown["image"][:2] == ["text", "**required**"]
    assert shown["groups"][:2] == ["`{NAME: value}`, each value: the keys below", "**required**"]
    assert shown["groups.NAME.count"][:2] == ["whole number", "`1`"]
    assert shown["max_restarts"][:2] == ["whole number", "`0`"]
    assert shown["request"][:2] == ["`{NAME: value}`, each value: any", "none"]
    assert shown["role"][:2] == ["text", "none"]


@pytest.mark.filterwarnings("ignore")  # of the SageMaker SDK, from which a public name is derived
@pytest.mark.parametrize("name", REFERENCE["GENERATED"])
def test_the_pages_in_the_repository_have_what_is_generated_today(name):
    """The pages in the repository match the code's commands, variables, keys and names."""
    page = (REFERENCE["FOLDER"] / f"{name}.md").read_text(encoding="utf-8")
    assert f"<!-- generated: {name} -->" in page
    assert page == REFERENCE["complete"](page), "run: python docs/reference.py"


def test_long_signatures_have_several_parameters_on_a_line():
    """Each line of a long signature has as many whole parameters as fit."""
    page = (REFERENCE["FOLDER"] / "python.md").read_text(encoding="utf-8")
    signature = re.search(r"^DataHost\(\n(.*?)^\)$", page, re.M | re.S)
    assert signature is not None
    lines = signature[1].splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if not line.startswith("    ") or not line.endswith(",")] == []
    assert lines[0].lstrip().startswith("address: str = '127.0.0.1:0', workers: int = 2, *,")
