"""Invalid settings are refused as soon as they are created."""

import pytest

from lightning_sm.data.settings import Credentials, DataServiceSettings
from lightning_sm.errors import DataSettingsError
from lightning_sm.job.variables import JOB_SECRET


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, r"data_service.workers=0 must be at least 1, or left out"),
        ({"window_batches": -1}, r"window_batches=-1 must be at least 1"),
        ({"window_bytes": 0}, r"window_bytes=0 must be positive"),
        ({"max_batch_bytes": -5}, r"max_batch_bytes=-5 must be positive"),
        ({"batch_timeout_s": 0.0}, r"batch_timeout_s=0.0 must be positive"),
        ({"hooks": "yes"}, r"hooks='yes' must be one of 'auto', 'trainers', 'data'"),
        (
            {"trust": ["10.0.0.1", "10.0.0.1/8"]},
            r"trust has '10.0.0.1/8' \(10.0.0.1/8 has host bits set\). Expected an addr",
        ),
        ({"trust": ["10.0.0.1:7000"]}, r"trust has '10.0.0.1:7000' .* without a port"),
        ({"tls_key": "key.pem"}, r"tls_certificate=None and data_service.tls_key=key.pem go together"),
        ({"tls_authority": "authority.pem"}, r"tls_authority=authority.pem needs both"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    """The error names the setting and its value, and describes a valid one."""
    with pytest.raises(DataSettingsError, match=message):
        DataServiceSettings(**wrong)


def test_addresses_networks_and_names_can_be_trusted():
    """``trust`` accepts IPv4 and IPv6 addresses, networks, and host names, which the data host resolves."""
    trust = ["10.0.0.1", "10.0.0.0/16", "fd00::1", "::/0", "algo-1.example.com"]
    assert DataServiceSettings(trust=trust).trust == trust


def test_settings_with_lists_have_a_hash():
    """Settings are hashable even with lists, because a training process caches its connection by settings."""
    lists = DataServiceSettings(trust=["10.0.0.5"])
    assert {lists: 1}[DataServiceSettings(trust=["10.0.0.5"])] == 1


def test_the_token_follows_from_secret_and_job():
    """Every job has a different token, and with a secret, the job's name alone is not enough to compute it."""
    settings, secret = DataServiceSettings(), {JOB_SECRET.name: "s" * 32}
    without = {job: Credentials.of(settings, job, {}) for job in "ab"}
    having = {job: Credentials.of(settings, job, secret) for job in "ab"}
    assert len({known.token for known in (*without.values(), *having.values())}) == 4
    assert Credentials.of(settings, "a", dict(secret)) == having["a"]
    sources = [known.token_source for known in (having["a"], without["a"])]
    assert sources == [JOB_SECRET.name, "the job's name"]


def test_tokens_are_not_printed():
    """The repr of credentials does not contain the token."""
    known = Credentials.of(DataServiceSettings(), "a", {})
    assert known.token not in repr(known)
