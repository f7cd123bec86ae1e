"""Drawing tables as plain text."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_sm._table import draw_table


def test_columns_are_as_wide_as_their_widest_cell():
    """Numbers may be right-aligned, lines have no trailing spaces, and cells may have several lines."""
    rows = [["algo-1", 9.5, "a\nbb"], ["algo-12345", 123.0, ""]]
    assert draw_table(rows, ["host", "seconds", "found"], right={"seconds"}) == (
        "host        seconds  found\n"
        "----------  -------  -----\n"
        "algo-1          9.5  a\n"
        "                     bb\n"
        "algo-12345    123.0"
    )


def test_a_table_may_have_no_headers_and_no_rows():
    """Headers and rows can each be omitted."""
    assert draw_table([("model", "s3://bucket"), ("output", "s3://b")]) == "model   s3://bucket\noutput  s3://b"
    assert draw_table([], ["job", "cost"]) == "job  cost\n---  ----"
    assert draw_table([]) == ""


@pytest.mark.parametrize("text", ["[bold]red[/bold]", "[/]", "hosts [1]", ":smile:", "95,110", "1e-7", "\\[x]"])
def test_cells_are_shown_as_they_are(text):
    """Brackets and colons are not markup, and text that looks like a number is not formatted."""
    assert draw_table([[text]], ["value"]).splitlines()[2] == text


def test_wide_characters_take_two_columns():
    """Columns after wide characters stay aligned in a terminal."""
    assert draw_table([["主机", "1"], ["host", "2"]]).splitlines() == ["主机  1", "host  2"]


def test_a_column_is_wrapped_at_its_own_width():
    """A column wraps between words where possible, else within a word; other columns do not wrap."""
    drawn = draw_table([["one two three abcdefghijkl", "x" * 300]], ["found", "path"], max_widths={"found": 8})
    assert [line[:8].rstrip() for line in drawn.splitlines()[2:]] == ["one two", "three", "abcdefgh", "ijkl"]
    assert "x" * 300 in drawn


@pytest.mark.parametrize("columns", ["20", "500"])
def test_tables_do_not_depend_on_the_terminal(columns):
    """The text does not depend on the terminal's width and has no colours, even if they are forced."""
    code = "from lightning_sm._table import draw_table; print(draw_table([['x' * 100, 'y z']], ['a', 'b']))"
    environment = {"COLUMNS": columns, "FORCE_COLOR": "1", "TERM": "xterm-256color", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"a{' ' * 101}b\n{'-' * 100}  ---\n{'x' * 100}  y z\n"
