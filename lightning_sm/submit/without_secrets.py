"""Requests as people may see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_sm.job.redaction import shown


def without_secrets(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request, or its description of a training job, with ``(hidden)`` in place of secrets."""
    safe: dict[str, Any] = shown("", request)
    return safe
