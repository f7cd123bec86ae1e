"""The names of the data hosts' channels, for which rank 0 makes the DataModule before it has a feeder."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import cycle

from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.protocol.grpc_client import GrpcChannel
from lightning_sm.data.protocol.grpc_status import CallError
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataHostMismatchError, DataHostUnreachableError

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
_PAUSE_S = 0.5
_REPORT_PERIOD_S = 30.0


def host_channels(
    addresses: Sequence[str], credentials: Credentials, timeout_s: float, *, is_quiet: bool
) -> tuple[str, ...]:
    """Ask one data host after the other for its channels, until one answers: it has run the script.

    Args:
        addresses: Addresses of the data hosts.
        credentials: Credentials for them.
        timeout_s: How long to wait for the first of them.
        is_quiet: Whether another rank of this host logs the same.

    Raises:
        DataHostUnreachableError: None answered in time.
        DataHostMismatchError: They refuse this rank.
        WireError: The answer is malformed.
    """
    deadline = time.monotonic() + timeout_s
    report_at = time.monotonic() + _REPORT_PERIOD_S
    with ExitStack() as stack:
        channels = [(one, stack.enter_context(closing(GrpcChannel(one, credentials)))) for one in addresses]
        for address, channel in cycle(channels):
            try:
                return tuple(HostReport.parse(channel.unary("Status", b"", _CALL_TIMEOUT_S)).channels)
            except CallError as error:
                why = f"data host at {address}: {error}"
                if error.is_final:
                    raise DataHostMismatchError(why) from error
            now = time.monotonic()
            if now >= deadline:
                break
            if now >= report_at and not is_quiet:
                report_at = now + _REPORT_PERIOD_S
                logger.info("Waiting for the data hosts to run the script, to ask for their channels: %s", why)
            time.sleep(_PAUSE_S)
    raise DataHostUnreachableError(
        f"No data host has said within {timeout_s:.0f} s (data_service.startup_timeout_s) which channels it has "
        f"({why}). See the logs of the data hosts."
    )
