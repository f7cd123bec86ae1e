"""Prices from the AWS price list."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from lightning_sm.submit.cost_limit import cost_problems
from lightning_sm.submit.price_list import with_list_prices
from tests.fakes.aws import stubbed_clients
from tests.unit.submit.test_cost_limit import shown_cost
from tests.unit.submit.test_request import JOB

# Two GPU hosts and one CPU host for two hours.
JOB = replace(JOB, prices={"ml.c5.xlarge": 0.6}, max_run_s=7200, max_cost=100.0)


@pytest.fixture
def clients():
    """Return clients with prepared answers."""
    with stubbed_clients() as made:
        yield made


def product(usage, price="1.408", unit="Hrs", currency="USD", term="OnDemand"):
    """Return a product of the price list."""
    dimensions = {"X.Y.Z": {"unit": unit, "pricePerUnit": {currency: price}}}
    attributes = {"usagetype": usage, "instanceName": "ml.g5.xlarge", "regionCode": "us-east-1"}
    return json.dumps(
        {"product": {"attributes": attributes}, "terms": {term: {"X.Y": {"priceDimensions": dimensions}}}}
    )


def test_the_price_of_a_training_host_on_demand_is_found(clients, caplog):
    """The price is found on any page, among those for other uses, sizes and terms; prices in the file are kept."""
    others = [
        *map(product, ("USE1-Host:ml.g5.xlarge", "USE1-Train:ml.g5.xlarge.more", "USE1-SpotTrain:ml.g5.xlarge")),
        product("USE1-Train:ml.g5.xlarge", "9", term="Reserved"),
        product("USE1-Train:ml.g5.xlarge", "9", unit="GB"),
        product("USE1-Train:ml.g5.xlarge", "9", currency="CNY"),
    ]
    filters = [("regionCode", "eu-west-1"), ("instanceName", "ml.g5.xlarge")]
    asked = {
        "ServiceCode": "AmazonSageMaker",
        "Filters": [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters],
    }
    clients.answers("pricing", "get_products", {"PriceList": others, "NextToken": "more"}, **asked)
    last = {"PriceList": [product("USE1-Train:ml.g5.xlarge")]}
    clients.answers("pricing", "get_products", last, **asked, NextToken="more")
    with caplog.at_level(logging.INFO):
        priced = with_list_prices(clients, JOB, "eu-west-1")
    assert priced.prices == {"ml.g5.xlarge": 1.408, "ml.c5.xlarge": 0.6}
    assert "From AWS's price list for eu-west-1, per hour on demand: ml.g5.xlarge $1.41" in caplog.text
    assert shown_cost(priced).startswith("The job can cost $6.83 (")
    assert [*cost_problems(priced)] == []
    assert JOB.prices == {"ml.c5.xlarge": 0.6}


def test_without_a_list_the_cost_stays_unknown(clients, caplog):
    """The cost stays unknown if the price list cannot be read or lacks the instance type."""
    clients.refuses("pricing", "get_products", "AccessDeniedException")
    with caplog.at_level(logging.INFO):
        assert with_list_prices(clients, JOB, "eu-west-1") is JOB
    assert "AWS's price list cannot be read: An error occurred (AccessDeniedException)" in caplog.text
    clients.answers("pricing", "get_products", {"PriceList": []})
    assert with_list_prices(clients, JOB, "eu-west-1") is JOB
    (problem,) = cost_problems(JOB)
    assert "there is no price for ml.g5.xlarge" in problem.text


def test_nothing_is_asked_where_the_file_has_all_prices(clients):
    """If the file has all prices, the list is not requested; the unprepared stub would raise an error."""
    complete = replace(JOB, prices={"ml.g5.xlarge": 1.5, "ml.c5.xlarge": 0.6})
    assert with_list_prices(clients, complete, "eu-west-1") is complete
