"""The keys with which a job's hosts authenticate each other, all derived from one secret."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from lightning_sm.job.variables import JOB_SECRET


def new_secret() -> dict[str, str]:
    """Return the variable that passes a new secret to the hosts of a job."""
    return {JOB_SECRET.name: secrets.token_hex(32)}


def job_key(purpose: str, job: str, env: Mapping[str, str]) -> bytes:
    """Return a job's key for one purpose; it reveals neither the job's secret nor the keys for other purposes.

    Without a secret, anyone who knows the job's name can derive the key, which then only protects against accidental
    connections between jobs.

    Args:
        purpose: The purpose of the key, with the version of the messages that it protects.
        job: The job's ARN or name.
        env: Environment variables, perhaps with the job's secret.

    Raises:
        JobConfigError: The secret is too short.
    """
    secret = JOB_SECRET.read(env) or ""
    text = f"{purpose}\0{job}"
    return hmac.new(secret.encode(errors="replace"), text.encode(errors="replace"), hashlib.sha256).digest()
