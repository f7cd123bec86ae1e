"""Log lines are shown whatever logging the script configures."""

import logging

import pytest

from lightning_sm._log import command_logger, show_log_lines


class Lines(logging.Handler):
    """A handler that keeps the messages it receives."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        """Keep the message."""
        self.lines.append(record.getMessage())


@pytest.fixture
def logger(monkeypatch):
    """Return the logger of lightning_sm in the state at the start of a script."""
    logger = logging.getLogger("lightning_sm")
    for name, value in {"handlers": [], "propagate": True}.items():
        monkeypatch.setattr(logger, name, value)
    before = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(before)


def test_a_script_without_logging_sees_them_on_stderr(logger, monkeypatch, capsys):
    """Each line is printed once and contains only the message."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_log_lines()
    show_log_lines()
    logger.getChild("part").info("epoch=1")
    assert capsys.readouterr().err == "epoch=1\n"


def test_a_script_with_logging_of_its_own_gets_them_too(logger, monkeypatch):
    """Lines reach the script's handler even if logging.basicConfig() leaves the root level at WARNING."""
    handler = Lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    show_log_lines()
    logger.getChild("part").info("epoch=1")
    assert handler.lines == ["epoch=1"]


def test_a_level_that_the_script_chose_stays(logger, monkeypatch):
    """A level that the script sets is respected."""
    handler = Lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logger.setLevel(logging.ERROR)
    show_log_lines()
    logger.getChild("part").info("epoch=1")
    assert handler.lines == []


def test_lines_of_a_command_begin_with_its_name(caplog):
    """The command's name precedes each line exactly once, even if the module is imported again."""
    for _ in range(2):
        log = command_logger("lightning_sm.some_command")
    log.warning("%d of %d hosts started", 1, 2)
    assert caplog.messages == ["lightning-sm: 1 of 2 hosts started"]
