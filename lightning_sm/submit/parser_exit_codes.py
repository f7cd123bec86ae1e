"""The exit codes of a process that only parses a script's command line; the parsers' own for a wrong one is 2."""

from __future__ import annotations

PARSED = 97
NOT_PARSED = 98
