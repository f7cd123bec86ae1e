"""Make the log lines of lightning_sm visible, as Lightning does with its own."""

from __future__ import annotations

import logging


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
