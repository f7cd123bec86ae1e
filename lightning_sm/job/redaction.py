"""Redaction of options, hyperparameters and variables, which hides values that are secret by name or by form.

A name is secret if one of its dotted parts ends in a secret word (``trainer.logger.init_args.api_key``, ``HF_TOKEN``,
``db-password``), or contains one that has no other meaning (``secrets.hub``, ``my_secret_name``). Other names
are not secret: ``tokenizer``, ``num_tokens`` and ``token_dim`` end in other words, ``eos_token`` and similar names
denote a piece of a vocabulary, and ``image_key`` and ``sort_key`` denote an entry in a mapping.

Some values are secret by their form, whatever their name: ``//user:password@host``, ``Bearer ...``, the signature in a
URL. A secret that has neither such a name nor such a form is shown, for example among positional arguments.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"

# Words that make a following "key" or "tokens" secret. Without one of them, a key may be that of a mapping.
_OPENING = (
    "access|account|admin|api|app|auth|client|consumer|decryption|deploy|encryption|gcp|gpg|hf|hmac|hub|kaggle|"
    "license|master|openai|pgp|private|refresh|rsa|secret|service|session|signing|ssh|storage|subscription|wandb"
)
# Endings that make a part of a name secret; the part's words are first joined in lower case.
_SAYS_SECRET = re.compile(
    r"(?:token|authorization|connectionstring|(?:secret|password|passwd|passphrase|credential|webhook|"
    rf"(?:{_OPENING})(?:key|token))s?)\Z"
)
# Words that make a name secret wherever they occur in a part, unless the part counts them ("passwords_per_second").
_ALWAYS_SECRET = re.compile(r"(?:secret|password|credential|webhook)s?|passwd|passphrase|authorization|sas")
# Short words that make a name secret only at the end: "pin_memory" and "auth_type" are not secret.
_SECRET_AT_THE_END = frozenset(["pw", "pwd", "jwt", "dsn", "cookie", "cookies", "bearer", "pin", "pat", "auth"])
# Words that may follow a secret name.
_FORMS_OF_VALUES = frozenset(["value", "values", "header", "string", "text", "json", "pem", "raw", "hex"])
# Words that precede "token" in the names of special tokens and of counts.
_OTHER_TOKENS = frozenset(
    {"bos", "cls", "eos", "mask", "max", "min", "num", "pad", "per", "sep", "special", "unk", "unknown"}
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Secrets within a text; the named groups are the parts to keep.
_FORMS = re.compile(
    r"""(?P<user>//[^/\s:@"']*:)[^/\s"']+(?=@)"""
    r"""|(?P<lone>//)[^/\s:@"']{20,}(?=@)"""
    r"""|(?P<header>\b[Aa]uthorization["']?\s*[:=]\s*["']?)[^\s"'][^"'\r\n]*"""
    r"""|(?P<bearer>\b[Bb]earer\s+)[^\s"',;]+"""
    r"""|(?P<query>(?:(?<=[?&;])sig|\bX-(?:Amz|Goog)-(?:Signature|Security-Token|Credential))=)[^&\s"']+"""
    r"""|(?P<begin>-----BEGIN [A-Z ]*PRIVATE KEY-----).*"""
    # Prefixes of tokens: GitHub, GitLab, Hugging Face, Slack, OpenAI and Anthropic, and JSON Web Tokens.
    r"""|\b(?:gh[a-z]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_\w{20,}|xox[a-z]-[\w-]{10,}"""
    r"""|sk-(?:(?:proj|ant|svcacct)-[\w-]{16,}|[A-Za-z0-9]{32,})|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)""",
    re.DOTALL,
)
_BASIC = re.compile(r"(\b[Bb]asic\s+)([A-Za-z0-9+/]{4,}={0,2})(?![A-Za-z0-9+/=])")
# A name before its value in JSON, YAML, Python or a command line, unless the value is empty, a constant or hidden.
_GIVEN = re.compile(
    r"""(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)[\\"']*\s*[:=]"""
    r"""(?!\s*(?:\(hidden\)|(?:null|None|true|True|false|False|""|'')(?=[\s,}\]]|\Z)|\Z))"""
    r"""|(?<![\w.-])--?(?P<option>[A-Za-z_][\w.-]*)[\\"',\s=/:]"""
)
# "--name", "-name", and Hydra's "name" before an equals sign.
_NAME = re.compile(r"[-+~]*[A-Za-z_][\w./+\[\]-]*")
_CONSTANTS = frozenset({"", "null", "none", "~", "true", "false"})


def is_secret(name: str) -> bool:
    """Return whether a name marks its value, or any value below it, as secret."""
    return any(map(_says_secret, name.split(".")))


def shown(name: str, value: Any, hidden: str | None = HIDDEN) -> Any:
    """Return a value with its secrets hidden.

    Args:
        name: Name of the option, hyperparameter, field or variable; empty for a value without a name.
        value: The value, or its text.
        hidden: The replacement for secrets.

    Returns:
        The value with ``hidden`` in place of each secret, and of each text that contains a named secret, such as JSON.
        None, true and false are never secret.
    """
    if is_secret(name):
        return value if _is_constant(value) or _is_size(name, value) else hidden
    if isinstance(value, str):
        return _shown_text(value, hidden)
    if isinstance(value, Mapping):
        # AWS represents tags and variables as pairs, in which the name of the secret is itself a value.
        named = {"Value": str(value.get("Key", value.get("Name", "")))} if "Value" in value else {}
        return {key: shown(named.get(key, str(key)), item, hidden) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        is_command_line = all(isinstance(item, str) for item in value)
        items = shown_arguments(value, hidden) if is_command_line else [shown("", item, hidden) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def shown_beginning(text: str) -> str:
    """Return another program's text up to the first named secret in it; ``HIDDEN`` replaces the rest."""
    masked = _masked(text)
    begin = _secret_begin(masked)
    return masked if begin is None else masked[:begin] + HIDDEN


def shown_arguments(arguments: Sequence[str], hidden: str | None = HIDDEN) -> list[Any]:
    """Return a command line with its secrets hidden.

    Args:
        arguments: The words of the command line: ``--name=value``, ``--name value``, ``name=value`` and others.
        hidden: The replacement for secrets.
    """
    words: list[Any] = []
    is_value = False  # whether the next word is the value of a secret option
    for argument in arguments:
        if is_value and not argument.startswith("--"):
            words.append(argument if _is_constant(argument) else hidden)
            continue
        name, equals, value = argument.partition("=")
        is_named = _NAME.fullmatch(name) is not None
        is_value = is_named and not equals and name.startswith("-") and is_secret(_plain(name))
        if is_named and equals:
            text = shown(_plain(name), value, hidden)
            words.append(f"{name}={'null' if text is None else text}")
        else:
            words.append(_shown_text(argument, hidden))
    return words


def _says_secret(part: str) -> bool:
    words = [word.lower() for word in _WORD.findall(part)]
    if "per" not in words and any(map(_ALWAYS_SECRET.fullmatch, words)):
        return True
    if words[-2:] == ["session", "id"] or "".join(words[-2:]) == "connectionstring":
        return True
    while len(words) > 1 and words[-1] in _FORMS_OF_VALUES:
        words.pop()
    if not _SAYS_SECRET.search("".join(words)):
        return bool(words) and words[-1] in _SECRET_AT_THE_END
    return not (words[-1] == "token" and words[-2:-1] and words[-2] in _OTHER_TOKENS)


def _plain(option: str) -> str:
    """Return the name of an option, without dashes and without jsonargparse's "+" for appending to a list."""
    return option.lstrip("-+~").rstrip("+")


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in _CONSTANTS)


def _is_size(name: str, value: Any) -> bool:
    """Return whether a value is a number and belongs to a model part whose name ends in "token"."""
    *parents, last = name.split(".")
    if _says_secret(last) or any(_says_secret(part) and not part.lower().endswith("token") for part in parents):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _shown_text(text: str, hidden: str | None) -> str | None:
    masked = _masked(text)
    return hidden if _secret_begin(masked) is not None or (hidden is None and masked != text) else masked


def _masked(text: str) -> str:
    return _BASIC.sub(_masked_basic, _FORMS.sub(_masked_form, text))


def _secret_begin(masked: str) -> int | None:
    """Return the position of the first secret name that has a value in a text, or None."""
    given = _GIVEN.finditer(masked)
    return next((match.start() for match in given if is_secret(match["name"] or match["option"])), None)


def _masked_form(match: re.Match[str]) -> str:
    return f"{match[match.lastgroup] if match.lastgroup else ''}{HIDDEN}"


def _masked_basic(match: re.Match[str]) -> str:
    """Hide the text after "Basic" only if it encodes user and password: the word may also begin a sentence."""
    try:
        is_pair = b":" in base64.b64decode(match[2], validate=True)
    except binascii.Error:
        is_pair = False
    return match[1] + HIDDEN if is_pair else match[0]
