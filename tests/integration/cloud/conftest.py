"""``lightning-sm jobs`` in this process, against a fake service on this machine."""

from __future__ import annotations

import logging
import os

import pytest

from lightning_sm.__main__ import main


@pytest.fixture
def jobs(tmp_path, monkeypatch, capsys, caplog):
    """A function that runs the command in an empty folder and returns its exit code, output and log lines."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(service, *argv):
        for name in [name for name in os.environ if name.upper().startswith("AWS")]:
            monkeypatch.delenv(name)
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            code = main(["jobs", *argv])
        return code, capsys.readouterr().out, caplog.text

    return run
