"""lightning_sm's loggers, whose lines are visible by default and have a prefix in commands."""

from __future__ import annotations

import logging


def command_logger(name: str) -> logging.Logger:
    """Return a logger whose messages begin with ``lightning-sm: ``, whichever handlers and formatters process them.

    Use it in commands, because their lines appear among the output of the scripts that they run.

    Args:
        name: Name of the logger.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_add_command_name)
    return logger


def show_log_lines() -> None:
    """Send ``lightning_sm`` messages from INFO upwards to the script's log handlers, or to stderr if none exist."""
    logger = logging.getLogger("lightning_sm")
    if logger.level == logging.NOTSET:  # otherwise root's level applies, which logging.basicConfig() leaves at WARNING
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
