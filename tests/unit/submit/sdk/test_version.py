"""Which SDK is installed."""

import importlib.metadata

import pytest

from lightning_sm.errors import SDKError
from lightning_sm.submit.sdk import version


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"sagemaker": "2.257.7"}, "v2"),
        ({"sagemaker": "3.27.0", "sagemaker-train": "1.27.0"}, "v3"),
        ({"sagemaker-train": "1.27.0"}, "v3"),
    ],
)
def test_the_version_is_that_of_the_distribution(monkeypatch, installed, expected):
    """Version 3 is several distributions, one of which has the name of version 2."""

    def installed_version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(version, "version", installed_version)
    assert version.sdk_version() == expected


def test_without_an_sdk_the_message_says_what_to_install(monkeypatch):
    """Both versions, and what works without."""

    def no_version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", no_version)
    with pytest.raises(SDKError, match=r"(?s)sagemaker\[local\]>=2.*sagemaker-train>=1.*lightning-sm local"):
        version.sdk_version()


def test_an_sdk_that_is_too_old_is_refused(monkeypatch):
    """Its rehearsal of a second job would send it."""
    installed = {"sagemaker-train": "1.20.0", "sagemaker-core": "2.20.1"}
    monkeypatch.setattr(version, "version", installed.__getitem__)
    with pytest.raises(SDKError, match=r"sagemaker-core 2\.20\.1 is installed; 2\.24 or newer .* pip install"):
        version.adapter()


def test_telemetry_is_off_and_the_rest_of_the_configuration_stays():
    """The user's defaults are the SDK's business; the dictionary that was passed is not changed."""
    given = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"X": 1}}, "TrainingJob": {"Y": 2}}}
    changed = version.without_telemetry(given)
    assert changed["SageMaker"] == {
        "PythonSDK": {"Modules": {"X": 1, "TelemetryOptOut": True}},
        "TrainingJob": {"Y": 2},
    }
    assert "TelemetryOptOut" not in given["SageMaker"]["PythonSDK"]["Modules"]
    assert version.without_telemetry({})["SchemaVersion"] == "1.0"
