"""Fixtures for tests of AWS calls."""

from __future__ import annotations

import pytest


@pytest.fixture
def clients(monkeypatch):
    """Return clients with prepared answers; the test fails if an answer is unused or the network is accessed."""
    from tests.fakes.aws import stubbed_clients  # Without boto3, these tests are skipped earlier.

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with stubbed_clients() as stubbed:
        yield stubbed
