"""The process that asks data hosts for the names of their channels: the training process loads no gRPC.

``python -m lightning_sm.data.feeder.ask_channels`` with the connection to the training process.
"""

from __future__ import annotations

import logging
import time
from itertools import cycle

import grpc

from lightning_sm.data.feeder.host_link import describe
from lightning_sm.data.ipc import feeder_messages as kinds
from lightning_sm.data.ipc.processes import connection_to_parent, run_and_exit
from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.protocol.calls import HostReport

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
_PAUSE_S = 0.5
_REPORT_PERIOD_S = 30.0
# Errors that a retry cannot fix.
_FATAL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION)


def ask(question: kinds.AskChannels) -> kinds.Channels | kinds.Failed:
    """Ask one data host after the other until one answers."""
    deadline = time.monotonic() + question.timeout_s
    report_at = time.monotonic() + _REPORT_PERIOD_S
    metadata = grpc_transport.metadata(question.credentials)
    channels = [(one, grpc_transport.open_channel(one, question.credentials)) for one in question.addresses]
    why = ""
    for address, channel in cycle(channels):
        method = channel.unary_unary(grpc_transport.method("Status"))
        try:
            report = HostReport.parse(method(b"", metadata=metadata, timeout=_CALL_TIMEOUT_S))
        except grpc.RpcError as error:
            why = f"data host at {address}: {describe(error)}"
            if error.code() in _FATAL:
                return kinds.Failed(None, "DataHostMismatchError", why)
        else:
            return kinds.Channels(report.channels)
        now = time.monotonic()
        if now >= deadline:
            break
        if now >= report_at and not question.is_quiet:
            report_at = now + _REPORT_PERIOD_S
            logger.info("Waiting for the data hosts to run the script, to ask for their channels: %s", why)
        time.sleep(_PAUSE_S)
    text = (
        f"No data host has said within {question.timeout_s:.0f} s (data_service.startup_timeout_s) which channels it "
        f"has ({why}). See the logs of the data hosts."
    )
    return kinds.Failed(None, "DataHostUnreachableError", text)


def main() -> None:
    """Ask, answer and exit."""
    trainer = connection_to_parent()
    question = trainer.receive()
    if isinstance(question, kinds.AskChannels):
        trainer.send(ask(question))


if __name__ == "__main__":
    run_and_exit(main)
