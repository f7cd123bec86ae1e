"""A boto3 session without network: the SDK runs as usual, and its CreateTrainingJob request is captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError

from lightning_sm.errors import SubmitError

# Answers to what the SDKs request before CreateTrainingJob. The account is a placeholder.
_ACCOUNT = "000000000000"
_ANSWERS: dict[str, dict[str, Any]] = {
    "GetCallerIdentity": {"Account": _ACCOUNT, "Arn": f"arn:aws:iam::{_ACCOUNT}:user/rehearsal", "UserId": "rehearsal"},
    "GetRole": {"Role": {}},
    "ListBuckets": {"Buckets": []},
}
# What the SDKs and their libraries raise for an invalid job; pydantic's errors are ValueErrors.
_REFUSALS = (TypeError, ValueError, RuntimeError, BotoCoreError, Boto3Error)


class _RequestReadyError(Exception):
    """The exception that ends a rehearsal; its argument is the complete request."""


class Gate:
    """A gate between a boto3 session and CreateTrainingJob, or all of the network, made of botocore's events.

    Args:
        boto_session: The session. The gate applies to clients that are created from it later: one gate for a session,
            as version 3 of the SDK keeps its first client.
    """

    def __init__(self, boto_session: boto3.Session) -> None:
        self._is_closed = False
        self._captures = False
        boto_session.events.register_first("before-call", self._answer)
        boto_session.events.register_first("provide-client-params.sagemaker.CreateTrainingJob", self._stop)

    def rehearse(self, submit: Callable[[], object]) -> dict[str, Any]:
        """Run a submission up to CreateTrainingJob without network.

        Args:
            submit: Calls the SDK with this session.

        Returns:
            The request.

        Raises:
            SubmitError: The SDK rejected the job, or finished without a request.
        """
        self._is_closed = True
        try:
            return self.capture(submit)
        finally:
            self._is_closed = False

    def capture(self, submit: Callable[[], object]) -> dict[str, Any]:
        """Run a submission up to CreateTrainingJob, uploads included.

        Args:
            submit: Calls the SDK with this session.

        Returns:
            The request.

        Raises:
            ClientError: AWS rejects an upload.
            SubmitError: The SDK rejected the job, or finished without a request.
        """
        level = logging.root.manager.disable
        logging.disable()  # the SDK logs an error because the request was not sent
        self._captures = True
        try:
            submit()
        except _RequestReadyError as ready:
            request: dict[str, Any] = ready.args[0]
            return request
        except _REFUSALS as error:
            raise SubmitError(f"The SDK rejected the job: {error}") from error
        finally:
            self._captures = False
            logging.disable(level)
        raise SubmitError("The SDK sent no CreateTrainingJob request; this lightning-sm and this SDK are incompatible.")

    def _answer(self, model: Any, **_: object) -> tuple[SimpleNamespace, dict[str, Any]] | None:
        if not self._is_closed:
            return None
        # botocore reads only the status of the HTTP response.
        return SimpleNamespace(status_code=200), {"ResponseMetadata": {}} | _ANSWERS.get(model.name, {})

    def _stop(self, params: dict[str, Any], **_: object) -> None:
        if self._captures:
            raise _RequestReadyError(params)
