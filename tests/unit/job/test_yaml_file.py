"""Reading the user's YAML and JSON files of names and values."""

from __future__ import annotations

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.job.yaml_file import read_mapping


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "lr: 1.5\nmode: x\n"), ("a.json", '{"lr": 1.5,\t"mode": "x"}')])
def test_yaml_and_json_are_read(tmp_path, name, text):
    """Each format is read by its rules: JSON may contain tabs."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_mapping(tmp_path / name, "file") == {"lr": 1.5, "mode": "x"}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none.yaml", None, r"none\.yaml cannot be read: No such file"),
        ("a.yaml", b"- 1", r"a\.yaml is not a mapping from names to values"),
        ("a.yaml", b"1: x", r"a\.yaml is not a mapping from names to values"),
        ("a.yaml", b"", r"a\.yaml is not a mapping from names to values"),
        ("a.json", b"{", r"a\.json is malformed: .*line 1"),
        ("a.yaml", b"\xff\xfe\xfd", r"a\.yaml is malformed: .*utf-8"),
    ],
)
def test_another_content_is_an_error_that_names_the_file(tmp_path, name, content, problem):
    """Any other content raises an error that names the file's purpose, its path and the problem."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JobConfigError, match=f"^The file of prices .*{problem}"):
        read_mapping(tmp_path / name, "file of prices")


def test_what_is_wrong_with_yaml_is_said_without_the_line(tmp_path):
    """A YAML error shows line and column, but does not quote the line, which may hold a secret."""
    (tmp_path / "a.yaml").write_text("port: 3\ntoken: S3CR3T: x", encoding="utf-8")
    with pytest.raises(JobConfigError, match="mapping values are not allowed here in line 2, column 14") as caught:
        read_mapping(tmp_path / "a.yaml", "config")
    assert "S3CR3T" not in str(caught.value)
