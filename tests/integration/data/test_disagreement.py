"""Data hosts that serve different data, or none."""

from __future__ import annotations

import re

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_sm.data.host.data_host import DataHost
from lightning_sm.errors import (
    BatchTooLargeError,
    DataHostMismatchError,
    DataServiceError,
    DataSettingsError,
    RemoteTransformError,
)
from tests.integration.data.cluster import Host, remote, running
from tests.integration.data.datasets import Augmented, Data

pytestmark = pytest.mark.processes


def versioned(version):
    """Return a function that makes a loader whose dataset tells its version."""

    class Versioned(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return index

        def fingerprint(self):
            return version

    return lambda: DataLoader(Versioned(), batch_size=4)


def failing_setup(error):
    """Return a DataModule whose setup raises."""

    class Failing(Data):
        def setup(self, stage):
            raise error

    return Failing(lambda: DataLoader(Augmented(8)))


def raising(error):
    """Return a function that raises."""

    def raise_error():
        raise error

    return raise_error


def error_of(*hosts, kind=DataServiceError, match="."):
    """Return the error with which the training loaders cannot be had."""
    with remote(hosts, startup_timeout_s=60) as module, pytest.raises(kind, match=match) as caught:
        module.train_dataloader()
    return str(caught.value)


def test_data_hosts_with_datasets_of_different_lengths_are_both_described():
    """Two data hosts that disagree are named with what each of them serves, since either may be wrong."""
    lengths = (40, 41)
    hosts = [Host(str(n), lambda n=n: DataLoader(Augmented(n), batch_size=4)) for n in lengths]
    with running(*hosts):
        text = error_of(*hosts, kind=DataHostMismatchError, match="Data hosts serve different data:")
    for host, length in zip(hosts, lengths, strict=True):
        assert re.search(rf"{re.escape(host.address)}: train_dataloader\(\): Augmented of {length}, fingerprint", text)


@pytest.mark.parametrize("odd", [0, 2])
def test_of_three_data_hosts_the_odd_one_is_named(odd):
    """The one whose dataset has another fingerprint is named, whichever of them answers first."""
    hosts = [Host(str(n), versioned("new" if n == odd else "old"), workers=1) for n in range(3)]
    with running(*hosts):
        text = error_of(*hosts, kind=DataHostMismatchError, match="different from most")
    assert f"Data hosts serve different data (different from most: {hosts[odd].address}):" in text
    assert len(set(re.findall(r"fingerprint (\w+)", text))) == 2
    assert all(host.address in text for host in hosts)


def test_what_setup_raises_comes_to_the_trainer_with_its_traceback():
    """The error names the data host and shows the line of the user's code."""
    with (
        DataHost(failing_setup(FileNotFoundError("no such shard"))) as host,
        pytest.raises(RemoteTransformError, match="no such shard") as caught,
        remote([host.address]),
    ):
        pass
    text = str(caught.value)
    assert f"Data host {host.address} failed in setup('fit')" in text
    assert "Traceback" in text
    assert "raise error" in text


def test_what_a_dataloader_hook_raises_comes_to_the_trainer_with_its_traceback():
    """The error names the data host and the hook and shows the line of the user's code."""
    with DataHost(Data(raising(KeyError("column")))) as host:
        text = error_of(host.address, kind=RemoteTransformError, match="KeyError: 'column'")
    assert f"Data host {host.address} failed in train_dataloader()" in text
    assert "raise_error" in text


def test_what_is_no_dataloader_is_named_by_its_place():
    """A list among the loaders is refused with its path in what the hook returned."""
    with DataHost(Data(lambda: {"a": DataLoader(Augmented(8)), "b": {"c": "text"}})) as host:
        error_of(host.address, kind=DataSettingsError, match=r"train_dataloader\(\)\['b'\]\['c'\] is a str\.")


def test_a_batch_with_too_much_text_is_refused_on_the_data_host():
    """Texts travel in the header, which has a limit; a batch above it fails instead of breaking every connection."""
    with (
        DataHost(Data(lambda: DataLoader(["x" * (65 << 20)], batch_size=1))) as host,
        remote([host.address]) as module,
        pytest.raises(BatchTooLargeError, match="Send long texts as bytes or uint8 tensors"),
    ):
        next(iter(module.train_dataloader()))
