"""A boto3 session that can be cut off from AWS: the SDKs run as usual, and the request that they would send is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError

from lightning_sm.errors import SubmitError

# What the SDKs ask for on the way to a request. The account is a placeholder: nobody was asked.
_ACCOUNT = "000000000000"
_ANSWERS: dict[str, dict[str, Any]] = {
    "GetCallerIdentity": {"Account": _ACCOUNT, "Arn": f"arn:aws:iam::{_ACCOUNT}:user/rehearsal", "UserId": "rehearsal"},
    "GetRole": {"Role": {}},
    "ListBuckets": {"Buckets": []},
}
# How the SDKs and what they use say that they do not like a job; pydantic's errors are ValueErrors.
_REFUSALS = (TypeError, ValueError, RuntimeError, BotoCoreError, Boto3Error)


@dataclass(frozen=True)
class _Reply:
    """As much of an HTTP response as botocore looks at."""

    status_code: int = 200


class _RequestReadyError(Exception):
    """Ends a rehearsal: the request is complete."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__("rehearsal")
        self.request = request


class Gate:
    """Stands between a boto3 session and the network, by botocore's events.

    Args:
        boto_session: The session; clients made from it later are behind the gate, too.
    """

    def __init__(self, boto_session: boto3.Session) -> None:
        self._is_closed = False
        boto_session.events.register_first("before-call", self._answer)
        boto_session.events.register_first("provide-client-params.sagemaker.CreateTrainingJob", self._stop)

    def rehearse(self, submit: Callable[[], object]) -> dict[str, Any]:
        """Run a submission up to CreateTrainingJob; nothing leaves this machine.

        Args:
            submit: Calls the SDK with this session.

        Returns:
            The request.

        Raises:
            SubmitError: The SDK refused the job, or came to an end without a request.
        """
        self._is_closed, level = True, logging.root.manager.disable
        logging.disable()  # the SDK calls it an error that the request was not sent
        try:
            submit()
        except _RequestReadyError as ready:
            return ready.request
        except _REFUSALS as error:
            raise SubmitError(f"The SDK refuses the job: {error}") from error
        finally:
            self._is_closed = False
            logging.disable(level)
        raise SubmitError("The SDK made no CreateTrainingJob request; lightning-sm and the SDK do not fit together.")

    def _answer(self, model: Any, **_: object) -> tuple[_Reply, dict[str, Any]] | None:
        if not self._is_closed:
            return None
        return _Reply(), {"ResponseMetadata": {}} | _ANSWERS.get(model.name, {})

    def _stop(self, params: dict[str, Any], **_: object) -> None:
        if self._is_closed:
            raise _RequestReadyError(params)
