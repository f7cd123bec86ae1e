"""Make the log lines of lightning_sm visible, as Lightning does with its own."""

from __future__ import annotations

import logging


def show_log_lines() -> None:
    """Write INFO and above of the ``lightning_sm`` loggers to stderr, unless the script set up logging itself."""
    logger = logging.getLogger("lightning_sm")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
