"""The cost of jobs, from their billable time and the user's prices.

Source:
    SageMaker API, DescribeTrainingJob: ``BillableTimeInSeconds`` is wall-clock time of the cluster, to be multiplied by
    the number of hosts; managed spot training saves ``1 - BillableTimeInSeconds / TrainingTimeInSeconds``. So spot
    capacity is billed as fewer seconds at the on-demand price. The hosts of a warm pool are billed separately
    (``ResourceRetainedBillableTimeInSeconds``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lightning_sm._table import draw_table
from lightning_sm._text import duration
from lightning_sm.cloud.hosts import HostGroup, groups_of
from lightning_sm.errors import JobConfigError
from lightning_sm.record.prices import Prices, cost


@dataclass(frozen=True)
class Bill:
    """The billable time of one training job.

    Attributes:
        name: Name of the job.
        status: The service's word for its status.
        groups: Its hosts.
        billed_s: Billable seconds of each host.
        training_s: Seconds for which the hosts were in use; more than ``billed_s`` with spot capacity.
        kept_s: Billable seconds of each host in the warm pool after the job.
        is_estimate: Whether the service has not yet stated the billable time.
        is_spot: Whether the job uses spot capacity.
        is_prepaid: Whether the job uses a training plan.
    """

    name: str
    status: str
    groups: Sequence[HostGroup]
    billed_s: float
    training_s: float
    kept_s: float
    is_estimate: bool
    is_spot: bool
    is_prepaid: bool


def bill(description: Mapping[str, Any], now: datetime) -> Bill:
    """Read the billable time of a job; if it still runs, the time since its training started.

    Args:
        description: An answer of DescribeTrainingJob.
        now: The current time.
    """
    billed = description.get("BillableTimeInSeconds")
    started = description.get("TrainingStartTime")
    ended = description.get("TrainingEndTime") or now
    elapsed_s = 0.0 if started is None else max(0.0, (ended - started).total_seconds())
    warm_pool = description.get("WarmPoolStatus", {})
    return Bill(
        name=description["TrainingJobName"],
        status=description["TrainingJobStatus"],
        groups=groups_of(description),
        billed_s=elapsed_s if billed is None else billed,
        training_s=description.get("TrainingTimeInSeconds", elapsed_s if billed is None else billed),
        kept_s=warm_pool.get("ResourceRetainedBillableTimeInSeconds", 0),
        is_estimate=billed is None,
        is_spot=bool(description.get("EnableManagedSpotTraining")),
        is_prepaid=bool(description.get("ResourceConfig", {}).get("TrainingPlanArn")),
    )


def shown_bills(bills: Sequence[Bill], prices: Prices) -> str:
    """Show what jobs cost, each instance group in a row.

    Args:
        bills: The bill of each training job.
        prices: Prices for all of their groups or instance types.

    Raises:
        JobConfigError: Prices are missing; the message names them.
    """
    if not bills:
        return "No training job has started, so nothing is billed yet."
    _check_prices(bills, prices)
    rows = [
        [
            one.name,
            one.status,
            group.name,
            f"{group.num_hosts} x {group.instance_type}",
            duration(one.billed_s),
            prices.amount(_amount(group, one.billed_s, prices)),
        ]
        for one in bills
        for group in one.groups
    ]
    lines = [draw_table(rows, ["job", "status", "group", "hosts", "billed", "cost"]), ""]
    total = math.fsum(_total(one, one.billed_s, prices) for one in bills)
    kept = math.fsum(_total(one, one.kept_s, prices) for one in bills)
    if kept:
        lines.append(f"warm pool: {prices.amount(kept)}, billed for the hosts that were kept after the job")
    about = "about " if any(one.is_estimate for one in bills) else ""
    lines.append(f"total: {about}{prices.amount(total + kept)}")
    lines += _spot_lines(bills, prices)
    running = [one.name for one in bills if one.is_estimate]
    if running:
        noun = "job has" if len(running) == 1 else "jobs have"
        lines.append(
            f"Estimate: {len(running)} {noun} no billable time yet; the time since training started is counted"
            + (", without spot savings." if any(one.is_spot for one in bills if one.is_estimate) else ".")
        )
    if any(one.is_prepaid for one in bills):
        lines.append("The hosts of a training plan are prepaid: this is what they would cost at these prices.")
    lines.append(f"Prices per hour of a host: {prices.source}. Storage, transfer and logs are not included.")
    return "\n".join(lines)


def _spot_lines(bills: Sequence[Bill], prices: Prices) -> list[str]:
    spot = [one for one in bills if one.is_spot and not one.is_estimate]
    paid = math.fsum(_total(one, one.billed_s, prices) for one in spot)
    full = math.fsum(_total(one, one.training_s, prices) for one in spot)
    if not full:
        return []
    billed_s, training_s = (sum(getattr(one, name) for one in spot) for name in ("billed_s", "training_s"))
    return [
        f"spot saved {1 - paid / full:.0%}, {prices.amount(full - paid)}: "
        f"{duration(billed_s)} of {duration(training_s)} were billed"
    ]


def _check_prices(bills: Sequence[Bill], prices: Prices) -> None:
    missing = {
        group.instance_type: None
        for one in bills
        for group in one.groups
        if prices.of(group.name, group.instance_type) is None
    }
    if missing:
        flags = " ".join(f"--price {name}=PRICE" for name in missing)
        raise JobConfigError(
            f"No price is known for {', '.join(missing)}. Give the hourly price of one host, in any currency: "
            f"{flags}, or --prices FILE. The AWS console and calculator show the prices of your region."
        )


def _total(one: Bill, seconds: float, prices: Prices) -> float:
    return math.fsum(_amount(group, seconds, prices) for group in one.groups)


def _amount(group: HostGroup, seconds: float, prices: Prices) -> float:
    price = prices.of(group.name, group.instance_type)
    return 0.0 if price is None else cost(price * group.num_hosts, seconds)
