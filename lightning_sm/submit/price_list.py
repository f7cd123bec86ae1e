"""Prices from AWS's price list, for instance types without a price in the job file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import Clients
from lightning_sm.record.prices import Prices
from lightning_sm.submit.cost_limit import types_without_price
from lightning_sm.submit.job_file import Job

_LOG = command_logger(__name__)

# A few regions serve the list for all regions: https://docs.aws.amazon.com/general/latest/gr/billing.html
_REGION = "us-east-1"


def with_list_prices(clients: Clients, job: Job, region: str) -> Job:
    """Return a job with missing on-demand prices filled in from AWS's price list, where possible.

    Args:
        clients: Clients for the AWS APIs.
        job: The content of the job file, whose prices take precedence.
        region: Region of the job.
    """
    missing = types_without_price(job)
    if not missing:
        return job
    try:
        pricing = clients.look("pricing", region=_REGION)
        listed = {instance_type: list(_prices(pricing, instance_type, region)) for instance_type in missing}
    except (ClientError, BotoCoreError) as error:
        _LOG.info("AWS's price list cannot be read: %s", error)
        return job
    found = {name: max(prices) for name, prices in listed.items() if prices}
    if not found:
        return job
    shown = ", ".join(f"{name} {Prices().amount(price)}" for name, price in found.items())
    _LOG.info("From AWS's price list for %s, per hour on demand: %s", region, shown)
    return replace(job, prices={**found, **job.prices})


def _prices(pricing: Any, instance_type: str, region: str) -> Iterator[float]:
    """Yield the hourly prices of a training host.

    Source:
        The usage types in SageMaker's bills and price list, such as ``USE1-Train:ml.g5.2xlarge``; GetProducts in AWS's
        Price List API, which returns products as JSON strings.
    """
    is_training = re.compile(rf"([A-Z0-9]+-)?Train:{re.escape(instance_type)}").fullmatch
    filters = {"regionCode": region, "instanceName": instance_type}
    pages = pricing.get_paginator("get_products").paginate(
        ServiceCode="AmazonSageMaker",
        Filters=[{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in filters.items()],
    )
    for product in (json.loads(text) for page in pages for text in page["PriceList"]):
        if not is_training(product["product"]["attributes"].get("usagetype", "")):
            continue
        for term in product["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                if dimension["unit"] == "Hrs" and "USD" in dimension["pricePerUnit"]:
                    yield float(dimension["pricePerUnit"]["USD"])
