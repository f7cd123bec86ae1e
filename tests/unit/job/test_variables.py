"""The table of environment variables is complete, and each value is checked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lightning_sm
from lightning_sm.errors import JobConfigError
from lightning_sm.job.variables import (
    DATA_GROUPS,
    DEVICES,
    HOST_ADDRESSES,
    INSTALL_REQUIREMENTS,
    MAIN_PORT,
    MODEL,
    PEERS_TIMEOUT_S,
    PREFIX,
    PREPARE_S,
    RECORD_DIR,
    SETTINGS,
    STOP_SCHEDULE,
    Install,
    Model,
    StopSchedule,
)

_PACKAGE = Path(lightning_sm.__file__).parent
_NOT_SECONDS = ["nan", "inf", "-inf", "-5", "1e10", "1e400", "10s", "x", "1,2", " "]


def _literals(path):
    """Yield the strings of a module, including those in f-strings but not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_only_the_table_spells_the_names():
    """Only the table contains variable names: the doctor would not know a name defined elsewhere."""
    others = [path for path in _PACKAGE.rglob("*.py") if path != _PACKAGE / "job" / "variables.py"]
    found = {str(path): text for path in others for text in _literals(path) if PREFIX in text}
    assert found == {}


def test_the_table_has_all_settings():
    """Each setting of the module is in the table exactly once, and its name has the common prefix."""
    names = [setting.name for setting in SETTINGS]
    assert sorted(names) == sorted(
        {text for text in _literals(_PACKAGE / "job" / "variables.py") if PREFIX in text} - {PREFIX}
    )
    assert all(name.startswith(PREFIX) for name in names)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_unset_means_the_default(setting):
    """An unset variable means the default, and so does an empty one unless the setting accepts it."""
    assert setting.read({}) == setting.default
    if not setting.accepts_empty:
        assert setting.read({setting.name: ""}) == setting.default


@pytest.mark.parametrize("setting", [STOP_SCHEDULE, MODEL], ids=lambda setting: setting.name)
def test_the_default_is_what_people_read(setting):
    """The displayed text of a default parses to the default; numbers are displayed without a text of their own."""
    assert setting.parse(setting.default_text) == setting.default


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (DATA_GROUPS, "", ()),
        (DATA_GROUPS, " a , b,,", ("a", "b")),
        (MAIN_PORT, "65535", 65535),
        (DEVICES, "1", 1),
        (PREPARE_S, "2.5", 2.5),
        (PEERS_TIMEOUT_S, "0", 0.0),
        (STOP_SCHEDULE, "0, 2.5", (0.0, 2.5)),
        (INSTALL_REQUIREMENTS, "unprotected", Install.UNPROTECTED),
        (MODEL, "weights", Model.WEIGHTS),
        (HOST_ADDRESSES, '{"algo-1": "10.0.0.1"}', {"algo-1": "10.0.0.1"}),
        (RECORD_DIR, "/tmp/record/2", Path("/tmp/record/2")),
    ],
)
def test_a_value_is_parsed(setting, text, value):
    """Values of each kind are parsed, including the limits of their ranges."""
    assert setting.read({setting.name: text}) == value


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        *((PEERS_TIMEOUT_S, text) for text in _NOT_SECONDS),
        *((PREPARE_S, text) for text in [*_NOT_SECONDS, "0"]),
        *(
            (STOP_SCHEDULE, text)
            for text in ["abc", "95", "1,2,3", "2,1", "-1,1", "nan,1", "1,nan", "1,inf", "95,1e10"]
        ),
        *((MAIN_PORT, text) for text in ["0", "65536", "-1", "1.5", "\u0663", " 80"]),
        *((INSTALL_REQUIREMENTS, text) for text in ["maybe", "2"]),
        *((MODEL, text) for text in ["best", "Full", "0"]),
        *((HOST_ADDRESSES, text) for text in ["x", "[]", '{"a": 1}', '{"a": ""}']),
    ],
)
def test_a_wrong_value_is_an_error_that_quotes_it(setting, text):
    """An invalid value raises an error with the variable, the value and the expected form."""
    with pytest.raises(JobConfigError, match=re.escape(f"{setting.name}={text!r}: expected ")):
        setting.read({setting.name: text})


def test_a_long_wrong_value_is_cut():
    """A long value is shortened: the service shows 1024 characters of an error, and the cause follows the value."""
    with pytest.raises(JobConfigError, match=r"x\.\.\.': expected a JSON object") as raised:
        HOST_ADDRESSES.read({HOST_ADDRESSES.name: "x" * 5000})
    assert len(str(raised.value)) < 500


def test_stop_schedule_is_read_from_the_environment():
    """The schedule has two times; an empty variable means the defaults."""
    assert STOP_SCHEDULE.read({"LIGHTNING_SM_STOP_SCHEDULE": ""}) == StopSchedule(95, 110)
    assert STOP_SCHEDULE.read({"LIGHTNING_SM_STOP_SCHEDULE": "0, 2.5"}) == StopSchedule(0, 2.5)
