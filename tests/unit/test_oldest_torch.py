"""The package loads with the oldest torch that it accepts, although the tests run with the newest."""

from tests.lint.oldest_torch import RECORD, imported_names, oldest


def test_the_oldest_torch_has_what_modules_import_as_they_load():
    """Each imported name was recorded with that torch by python -m tests.lint.oldest_torch."""
    version, *known = RECORD.read_text(encoding="utf-8").splitlines()
    assert version.startswith(f"torch {oldest()}.")
    assert set(imported_names()) <= set(known)
