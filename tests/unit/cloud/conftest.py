"""Fixtures: clients with prepared answers."""

from __future__ import annotations

import pytest


@pytest.fixture
def clients(monkeypatch):
    """Clients with prepared answers; the test fails if one was not asked for, or tries to reach the network."""
    from tests.fakes.aws import stubbed_clients  # where boto3 is missing, the tests are skipped before

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with stubbed_clients() as stubbed:
        yield stubbed
