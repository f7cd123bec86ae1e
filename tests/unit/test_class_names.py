"""The check for duplicate class names in ``make lint``."""

from __future__ import annotations

from tests.lint.class_names import repeated_class_names


def test_a_class_name_in_two_files_is_found(tmp_path):
    """Private and nested classes count, and leading underscores are ignored."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("class Host: ...\nclass Once: ...\n", encoding="utf-8")
    (tmp_path / "sub/b.py").write_text("class Outer:\n    class _Host: ...\n", encoding="utf-8")
    assert repeated_class_names(tmp_path) == {"Host": [f"{tmp_path}/a.py:1", f"{tmp_path}/sub/b.py:2"]}
