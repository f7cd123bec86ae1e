"""Redaction: values are hidden if their names or their form show that they are secret."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.hyperparameters import encode, to_argv
from lightning_sm.job.redaction import HIDDEN, is_secret, shown, shown_arguments

SECRET_NAMES = [
    "token",
    "data_service.token",
    "trainer.logger.init_args.api_key",
    "trainer.logger.init_args.api-key",
    "model.apiKey",
    "apikey",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "LIGHTNING_SM_JOB_SECRET",
    "db.password",
    "db.passwd",
    "credential",
    "gcp.credentials",
    "ssl.private_key",
    "secrets.hub",
    "HyperParameters['x.token']",
    "account_key",
    "storage_account_key",
    "sas_url",
    "AZURE_STORAGE_CONNECTION_STRING",
    "encryption_key",
    "signing_key",
    "ssh_key",
    "kaggle_key",
    "license_key",
    "private_key_pem",
    "secret_value",
    "my_secret_name",
    "token_value",
    "hub_tokens",
    "authorization",
    "auth_header",
    "model.bearer",
    "jwt",
    "cookie",
    "session_id",
    "pwd",
    "db.userPwd",
    "DB_PW",
    "pin",
    "dsn",
    "github_pat",
    "SLACK_WEBHOOK_URL",
    "GOOGLE_APPLICATION_CREDENTIALS_JSON",
]
OPEN_NAMES = [
    "",
    "tokenizer",
    "model.tokenizer.name",
    "num_tokens",
    "max_tokens",
    "max_token",
    "token_dim",
    "eos_token",
    "model.pad_token",
    "key",
    "monitor_key",
    "AWS_ACCESS_KEY_ID",
    "secretary",
    "passwords_per_second",
    "image_key",
    "sort_key",
    "query_key",
    "prefix_tokens",
    "auth_type",
    "pin_memory",
    "path",
    "pattern",
    "authors",
    "session",
    "connection",
    "label_text",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_that_say_so_are_secret(name):
    """The last word of a name's part decides, however the words are joined."""
    assert is_secret(name)
    assert shown(name, "S3CR3T") == HIDDEN


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_names_of_other_things_are_shown(name):
    """Counts, sizes, tokenizers and vocabulary items are not secret."""
    assert not is_secret(name)
    assert shown(name, "value") == "value"


@pytest.mark.parametrize("value", [None, True, False, "", "null", "None", "true", "False"])
def test_a_value_that_says_nothing_is_shown(value):
    """Values that only show whether a token is set or used are not secret."""
    assert shown("token", value) is value


def test_sizes_of_a_part_called_token_are_shown():
    """Only numbers are shown below a name that ends in token; below other secret names, everything is hidden."""
    assert shown("model.token.dim", 3) == 3
    assert shown("model.token.dim", "3") == "3"
    assert shown("model.token.value", "S3CR3T") == HIDDEN
    assert shown("secrets.pin", "1234") == HIDDEN


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit", "--a.token=x", "--b=1"], ["fit", "--a.token=(hidden)", "--b=1"]),
        (["fit", "--a.token", "x", "--b", "1"], ["fit", "--a.token", "(hidden)", "--b", "1"]),
        (["--passwords", "x", "y", "--b"], ["--passwords", "(hidden)", "(hidden)", "--b"]),
        (["-token", "x=y"], ["-token", "(hidden)"]),
        (["--token", "null"], ["--token", "null"]),
        (["++data.token=x", "lr=1"], ["++data.token=(hidden)", "lr=1"]),
        (["--loggers.api_key+=x"], ["--loggers.api_key+=(hidden)"]),
        (['--s={"token": "x", "port": 3}'], ["--s=(hidden)"]),
        (["--s", "{'token': 'x'}"], ["--s", "(hidden)"]),
        (["--config=s:\n  token: x\n"], ["--config=(hidden)"]),
        (['--s={"tokenizer":"a",  "b": 1}'], ['--s={"tokenizer":"a",  "b": 1}']),
        (["--s=port=3,token=x"], ["--s=(hidden)"]),
        (["--url=https://host/?token=x"], ["--url=(hidden)"]),
        (['--run=["train.py", "--token", "x"]'], ["--run=(hidden)"]),
        (["--options=-x HF_TOKEN=x"], ["--options=(hidden)"]),
        (['--s={"token": null, "port": 3}'], ['--s={"token": null, "port": 3}']),
        (['--s={"token": "}x"}'], ["--s=(hidden)"]),
        (["--s={'token': null-x}"], ["--s=(hidden)"]),
        (["--prompt=What is a token?"], ["--prompt=What is a token?"]),
    ],
)
def test_command_lines(arguments, expected):
    """Secrets are hidden in every notation, and all other words stay unchanged."""
    assert shown_arguments(arguments) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://me:S3CR3T@db/x?y=1", "postgres://me:(hidden)@db/x?y=1"),
        ("https://me:S3CR3T@S3CR3T@host/", "https://me:(hidden)@host/"),
        ("https://ghp_S3CR3Tabcdefghijklmno@github.com/x", "https://(hidden)@github.com/x"),
        ("https://host/x?a=1&sig=S3CR3T%3D&b=2", "https://host/x?a=1&sig=(hidden)&b=2"),
        ("https://b.s3/x?X-Amz-Date=1&X-Amz-Signature=S3CR3T", "https://b.s3/x?X-Amz-Date=1&X-Amz-Signature=(hidden)"),
        ("Bearer S3CR3T", "Bearer (hidden)"),
        ("Basic dXNlcjpTM0NSM1Q=", "Basic (hidden)"),
        ("curl -H 'authorization:Bearer S3CR3T' x", "curl -H 'authorization:(hidden)' x"),
        ("Authorization: Token S3CR3T", "Authorization: (hidden)"),
        ("use ghp_S3CR3TS3CR3TS3CR3T12", "use (hidden)"),
        ("sk-proj-S3CR3T_S3CR3T-S3CR3T", "(hidden)"),
        ("a eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.S3CR3T", "a (hidden)"),
        ("-----BEGIN RSA PRIVATE KEY-----\nS3CR3T\n-----END", "-----BEGIN RSA PRIVATE KEY-----(hidden)"),
        ('{"url": "redis://:S3CR3T@host", "lr": 1}', '{"url": "redis://:(hidden)@host", "lr": 1}'),
    ],
)
def test_secrets_are_known_by_their_form(text, expected):
    """Secrets are recognised in any text and under any name, and the text around them stays unless hidden is None."""
    assert shown("x", text) == expected
    assert shown("", {"a": [{"b": text}]}) == {"a": [{"b": expected}]}
    assert shown_arguments([f"--x={text}", "--x", text, text]) == [f"--x={expected}", "--x", expected, expected]
    assert shown("x", text, hidden=None) != text
    assert "S3CR3T" not in json.dumps(shown("", {"x": text, "y": json.dumps(text)}))


@pytest.mark.parametrize(
    "text",
    [
        "Basic training",
        "basic configuration",
        "ssh://git@host/x",
        "http://host:8080/a",
        "sig=0.5",
        "user@host",
        "a//b:c",
    ],
)
def test_forms_of_other_things_are_shown(text):
    """Addresses without a password, and words that only look like a header, are shown."""
    assert shown("x", text) == text
    assert shown_arguments([text]) == [text]


def test_pairs_of_a_request_are_known_by_their_names():
    """AWS writes tags as key-value pairs, so the key decides whether the value is hidden."""
    pairs = [
        {"Key": "api_key", "Value": "S3CR3T"},
        {"Name": "HF_TOKEN", "Value": "S3CR3T"},
        {"Key": "team", "Value": "a"},
    ]
    assert [pair["Value"] for pair in shown("Tags", pairs)] == [HIDDEN, HIDDEN, "a"]


def test_another_mark():
    """In files that are read back, null replaces a secret."""
    assert shown("s", {"token": "x", "port": 3}, hidden=None) == {"token": None, "port": 3}
    assert shown_arguments(["--token=x"], hidden=None) == ["--token=null"]


def test_text_that_cannot_be_read():
    """Unparsable text that has a secret's name before a value is hidden entirely, whatever its notation."""
    assert shown("s", '{"token": "x", "port') == HIDDEN
    assert shown("s", "[" * 100_000 + '"token": "x"') == HIDDEN


# ---- properties

_secrets = st.text("abcdefgh0123456789{}[]\"'=:,# -\\", min_size=6, max_size=30).map(lambda text: f"S3CR3T{text}S3CR3T")
_open_names = st.sampled_from(["data", "logger", "x", "tokenizer", "init_args"])
_secret_names = st.sampled_from(["token", "api_key", "hub-password", "secrets", "authToken"])


def _nested(secret: str) -> st.SearchStrategy[dict[str, object]]:
    """Generate a configuration that holds the secret at some depth, under a secret name."""
    leaf = st.fixed_dictionaries({}).flatmap(lambda _: _secret_names.map(lambda name: {name: secret, "port": 3}))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(_open_names, inner).map(lambda pair: {pair[0]: pair[1]}),
            st.tuples(_open_names, inner).map(lambda pair: {pair[0]: [1, pair[1], "other"]}),
        ),
        max_leaves=4,
    )


def _flat(config: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_secret_never_appears(data):
    """No part of a secret is shown, whatever it contains and however it is written."""
    secret = data.draw(_secrets)
    config = data.draw(_nested(secret))
    flat = _flat(config)
    command_lines = [
        [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in flat.items()],
        [word for name, value in flat.items() for word in (f"--{name}", str(value))],
        [f"--data={json.dumps(config)}"],
        [f"--data={config!r}"],
        ["--data", yaml.safe_dump(config)],
        ["--data", yaml.safe_dump(config, default_flow_style=True)],
        [f"--data={json.dumps(json.dumps(config))}"],
        [f"--data={json.dumps(config)[:-1]}"],
    ]
    for hyperparameters in (config, flat):
        try:
            encoded = encode(hyperparameters)
            command_lines.append(to_argv(encoded))
        except HyperparameterError:
            continue
        assert "S3CR3T" not in json.dumps(shown("", encoded))
    for command_line in command_lines:
        assert "S3CR3T" not in " ".join(shown_arguments(command_line)), command_line
    assert "S3CR3T" not in json.dumps(shown("", config))


@given(text=st.text())
def test_text_without_a_name_is_shown(text):
    """Ordinary text is shown unchanged."""
    if not any(word in text.lower() for word in ("token", "secret", "passw", "passphrase", "credential", "key")):
        assert shown("x", text) == text
