"""The program that runs Lightning's own tests on data hosts: ``python -m tests.lightning_suite SOURCE``."""

from __future__ import annotations

import pytest

from tests.lightning_suite.__main__ import PROPERTY, Suite

_TEST = """
from itertools import count
from unittest import mock

from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

def test_fit(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=2, accelerator="cpu")
    with mock.patch("time.perf_counter", side_effect=[]), mock.patch("time.monotonic", side_effect=count(0, 3600)):
        trainer.fit(BoringModel())
    trainer.validate(BoringModel(), verbose=False)
"""


@pytest.mark.proof
def test_loaders_of_a_test_are_served_by_a_data_host(tmp_path):
    """A test passes on a data host, with two runs of a Trainer, although it replaces the clocks."""
    tests = tmp_path / "tests_pytorch"
    tests.mkdir()
    (tests / "test_some.py").write_text(_TEST)
    report = Suite(tests, 1, ()).run(["test_some.py"], "remote", is_remote=True)
    assert report.find("testsuite").get("tests") == "1", (tmp_path / "remote.log").read_text()
    assert not report.findall(".//failure") + report.findall(".//error"), (tmp_path / "remote.log").read_text()
    assert report.find(f".//property[@name='{PROPERTY}']").get("value") == "2"
