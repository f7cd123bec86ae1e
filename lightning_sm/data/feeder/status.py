"""Descriptions of hosts and failures for the training process. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import asdict, replace

from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.feeder.scheduler import FailureDecision, HostStatus, Retry
from lightning_sm.data.ipc.feeder_messages import HostSnapshot
from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.protocol.failures import LOST_WORKERS, USER_ERRORS, error_class
from lightning_sm.errors import DataServiceError
from lightning_sm.record.data_figures import HostFigures, RankFigures

# Retry policies for errors that data hosts report. All other errors are final.
RETRIES = {
    **dict.fromkeys(USER_ERRORS, Retry.ONCE),
    **dict.fromkeys(LOST_WORKERS, Retry.LIMITED),
    "NotOpen": Retry.ELSEWHERE,
    "StreamMoved": Retry.ELSEWHERE,
}

_NUM_SHOWN_KEYS = 16


def explain(error: str, step: int, decision: FailureDecision, keys: list[int]) -> DataServiceError:
    """Return the error that ends a pass.

    Args:
        error: Name of the error that a data host reported last.
        step: The step that failed.
        decision: What failed in the step: how and where each worker was lost, or the full messages of its errors.
        keys: Indices of the samples in the step.
    """
    if error in LOST_WORKERS:
        num_hidden = len(keys) - _NUM_SHOWN_KEYS
        shown = f", at indices {keys[:_NUM_SHOWN_KEYS]}" if keys else ""  # batches of a stream have no indices
        shown += f" and {num_hidden} more" if num_hidden > 0 else ""
        counts = Counter(decision.failures).items()
        lost = "; ".join(f"a worker {how}" + (f" ({number} times)" if number > 1 else "") for how, number in counts)
        if error == "WorkerNotStarted":
            return DataServiceError(
                f"The data hosts' workers cannot start: {lost}. Check worker_init_fn and the logs of the data hosts. "
                "The workers may also need more memory than is available."
            )
        return DataServiceError(
            f"Step {step} kills the data hosts' workers: {lost}. Look for samples that crash native code or use too "
            f"much memory{shown}."
        )
    return error_class(error)(decision.failures[-1])


def host_snapshot(link: HostLink, status: HostStatus | None) -> HostSnapshot:
    """Describe a data host.

    Args:
        link: The connection to the host.
        status: The host's status in the scheduler, or None if the host was never reached.
    """
    status = status or HostStatus(link.name)
    report = link.report or HostReport(HostFigures(link.name))
    figures = replace(
        report.host,
        name=link.name,
        state=status.state.value,
        why=link.detail,
        transfer_s=link.transfer_s,
        num_received=status.num_completed,
        num_retries=status.num_retries,
        num_hedges=status.num_hedges,
        num_lost=link.num_lost,
    )
    return HostSnapshot(**asdict(figures), in_flight=status.num_in_flight, busy=report.busy)


def rank_figures(links: Iterable[HostLink]) -> dict[str, RankFigures]:
    """Return the latest figures that data hosts have for each rank, by rank name."""
    latest: dict[str, RankFigures] = {}
    for link in links:
        reported = {} if link.report is None else link.report.figures
        for rank, figures in reported.items():
            if rank not in latest or figures.num_batches > latest[rank].num_batches:
                latest[rank] = figures
    return latest
