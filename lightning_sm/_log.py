"""Log lines of lightning_sm: visible by default, those of the commands with the command's name."""

from __future__ import annotations

import logging


def command_logger(name: str) -> logging.Logger:
    """Return a logger whose messages begin with ``lightning-sm: ``, whatever handlers and formatters see them.

    For the commands, whose lines stand among those of the scripts that they run.

    Args:
        name: Name of the logger.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_add_command_name)
    return logger


def show_log_lines() -> None:
    """Write INFO and above of the ``lightning_sm`` loggers: where the script's own logging does, else to stderr."""
    logger = logging.getLogger("lightning_sm")
    if logger.level == logging.NOTSET:  # else root's level counts, which logging.basicConfig() leaves at WARNING
        logger.setLevel(logging.INFO)
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _add_command_name(record: logging.LogRecord) -> bool:
    record.msg = f"lightning-sm: {record.msg}"
    return True
