"""Prices from the user: a file, and options that override it."""

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.prices import FILE_FORMAT, Prices, cost, read_prices


def test_the_documented_file_is_valid(tmp_path):
    """The file shown in error messages and docs can be read."""
    file = tmp_path / "prices.yaml"
    file.write_text(FILE_FORMAT)
    prices = read_prices(file, [])
    assert prices == Prices({"ml.g5.xlarge": 1.41, "ml.c5.4xlarge": 0.82}, "$", str(file))


def test_options_override_the_file(tmp_path):
    """An option wins over the file, and both are named as the source."""
    file = tmp_path / "prices.json"
    file.write_text('{"currency": "EUR", "per_hour": {"a": 1, "b": 2}}')
    prices = read_prices(file, ["b=3.5", "c=0"])
    assert prices.per_hour == {"a": 1.0, "b": 3.5, "c": 0.0}
    assert prices.source == f"{file}, --price"
    assert prices.amount(3.5) == "EUR 3.50"


def test_no_prices_are_built_in():
    """Without prices from the user, nothing has a price."""
    prices = read_prices(None, [])
    assert not prices
    assert prices.of("trainer", "ml.g5.xlarge") is None
    assert prices.total([("trainer", "ml.g5.xlarge")]) is None


def test_a_group_counts_before_the_instance_type():
    """Groups with the same instance type may have different prices, such as for spot or reserved instances."""
    prices = Prices({"data": 0.5, "ml.c5.xlarge": 0.2})
    assert prices.total([("data", "ml.c5.xlarge"), ("trainer", "ml.c5.xlarge")]) == pytest.approx(0.7)
    assert prices.total([("data", None), ("trainer", "ml.g5.xlarge")]) is None


def test_cost_is_by_the_hour():
    """A price per hour for 1.19 s is divided by 3,600, not by 60 as in a published comparison."""
    assert cost(3.825, 1.19) == pytest.approx(0.001264, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "text"), [(12345.678, "$12,345.68"), (0, "$0.00"), (0.00126437, "$0.0013"), (0.5, "$0.50"), (1, "$1.00")]
)
def test_small_amounts_keep_two_digits(value, text):
    """A step costs a fraction of a cent, which must not be printed as zero."""
    assert Prices().amount(value) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("per_hour: [1", "is not valid YAML"),
        ("- 1", r"(?s)price file .* is not a mapping .*\nper_hour:"),
        ("ml.g5.xlarge: 1.41", r"(?s)unknown key: ml\.g5\.xlarge\. .*\nper_hour:"),
        ("currency: $", "missing required field `per_hour`"),
        ("{per_hour: {a: 1}, curency: $}", "unknown key: curency"),
        ("per_hour: {a: cheap}", r"Expected `float`, got `str` - at `\$\.per_hour"),
        ("per_hour: {a: -1}", "Expected `float` >= 0"),
        ("per_hour: {a: .inf}", "Expected `float` < 1"),
        ("per_hour: {a: true}", "Expected `float`, got `bool`"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, message):
    """The error names the file, the place and the value."""
    file = tmp_path / "prices.yaml"
    file.write_text(content)
    with pytest.raises(JobConfigError, match=message) as caught:
        read_prices(file, [])
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("flag", ["1.41", "=1", "a=", "a=x", "a=inf", "a=1e308"])
def test_a_wrong_option_is_refused(flag):
    """An option without a name or a number raises an error that quotes it."""
    with pytest.raises(JobConfigError, match="--price"):
        read_prices(None, [flag])


def test_a_missing_file_is_named(tmp_path):
    """A missing file raises an error in one line."""
    with pytest.raises(JobConfigError, match=r"none\.yaml cannot be read: No such file"):
        read_prices(tmp_path / "none.yaml", [])
