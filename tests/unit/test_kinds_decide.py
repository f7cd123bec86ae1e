"""Code decides by kinds, never by text for people. The exceptions below parse text that other programs write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_sm

_PACKAGE = Path(lightning_sm.__file__).parent
_CUTS = {"startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "split", "rsplit"}
_SEARCHES = {"find", "rfind", "index", "rindex", "replace", "count"}
_PATTERNS = {"compile", "match", "search", "sub", "subn", "fullmatch", "findall", "finditer", "split"}
# Names of variables and attributes that hold text for people.
_TEXTS = {"reason", "text", "message", "report", "phase", "headline", "cause", "words", "why"}
# A letter followed by a space, or a space followed by a word: "failed with ", " on ", "error: ".
_PHRASE = re.compile(r"[^\W\d_][.:,;!?]? | [^\W\d_]{2}")

_STDERR = "a script that writes no failure file says why it dies only in what Python, argparse and torch print"
_SERVICE = "AWS has no field for it"
_SETTING = "the syntax of a setting or an argument"
_SECRETS = "hides secrets in whatever a text says"
# The reason for each exception, by file and by the constant or expression.
_EXCEPTIONS = {
    "_text.py": {"_ESCAPES.sub('', text)": "what a terminal would act upon"},
    "cloud/follow.py": {"_EXIT_CODE": _SERVICE},
    "cloud/logs.py": {"_HOST.findall(reason)": _SERVICE},
    "data/protocol/probe.py": {"first.startswith(REFUSED)": "a message of the protocol"},
    "data/server/peers.py": {"text.partition('%')": "the zone of an address"},
    "emulator/faults.py": {
        "_PATTERNS[kind].fullmatch(text, len(name))": _SETTING,
        "re.split('[:@]', text, maxsplit=1)": _SETTING,
    },
    "emulator/options.py": {
        "_GROUP.fullmatch(text)": _SETTING,
        "text.partition('=')": _SETTING,
        r"'\x00' in text": _SETTING,
    },
    "job/failure_file.py": {
        "_LOST_PEER": "Gloo and NCCL have no exception type for a lost peer",
        "_LOST_PEER.search(text)": "as above",
    },
    "job/hyperparameters.py": {
        "_NOT_YAML": "characters",
        "_NOT_YAML.search(text)": _SETTING,
        "text.startswith(('[', '{', '('))": _SETTING,
    },
    "job/overrides.py": {
        "_PLAIN.fullmatch(text)": _SETTING,
        "_IMPOSSIBLE.search(text)": _SETTING,
        "_QUOTE_OR_END.sub(_escaped, text)": _SETTING,
    },
    "job/redaction.py": {
        "_FORMS": _SECRETS,
        "_FORMS.sub(_masked_form, text)": _SECRETS,
        "'per' not in words": "the words of a name",
    },
    "job/variables.py": {
        "re.fullmatch('[0-9]{1,9}', text)": _SETTING,
        "text.partition(',')": _SETTING,
        "text.split(',')": _SETTING,
    },
    "job/traceback_text.py": {
        "ANSI.sub('', text)": _STDERR,
        "START": _STDERR,
        "_FRAME": _STDERR,
        "WARNING": _STDERR,
        "RANK.sub('', before).startswith(_SURVIVED)": _STDERR,
    },
    "launcher/failure.py": {
        "_USAGE": _STDERR,
        "_USAGE_ERROR": _STDERR,
        "_LIBRARY": _STDERR,
        "_OWN_ERROR.match(reason)": _STDERR,
    },
    "launcher/toolkit/variables.py": {r"'\x00' not in text": _SETTING},
    "launcher/user_code/requirements.py": {
        "'No matching distribution found' in message": "pip says why it failed in its output only"
    },
    "launcher/user_code/script_kind.py": {
        "_CLI.search(text)": "a script says in its source only how it reads its arguments",
        "_HYDRA.search(text)": "as above",
        "_OTHERS.search(text)": "as above",
    },
    "report/verdict.py": {"run.outcome == RUNNING": "the constant is the kind, and says itself to people"},
    "submit/retry.py": {"_QUOTA": _SERVICE, "_NO_CAPACITY not in reason": _SERVICE},
    "training/argument_parser.py": {
        "re.search(name, message)": "argparse names an unknown option only in its message",
        "'unrecognized arguments' in message.lower()": "as above",
    },
    "submit/request_limits.py": {"re.fullmatch(_pattern(pattern), text)": _SETTING},
    "report/live.py": {
        "run.outcome not in (RUNNING, INTERRUPTED)": "the constant is the kind, and says itself to people",
        "one.text.split()": "puts a text on one line",
    },
    "training/checkpoints/fits.py": {
        "frame.f_code.co_filename.startswith(('<frozen ', _OWN_PACKAGE))": "the interpreter marks its frames so"
    },
    "training/checkpoints/durable_io.py": {
        "_STREAM_WRITER": "torch raises a RuntimeError for a full disk",
        "'://' in text": "an address",
    },
    "training/checkpoints/find_newest.py": {
        r"re.search('GLOBAL ([\\w.]+)', str(error))": "torch's error has no field for it"
    },
}
# Constants used by former decisions; the check must find each of these decisions.
_ONCE = r"""
HANG = "The training hangs:"
DATA_WAIT = "data_wait"
_SUCCESSES = ("finished", "the process ended")
_ALONE_START = "No Trainer used SageMakerEnvironment."
_TRACEBACK = "Traceback (most recent call last):"
_BANNER = re.compile(r"\| host (\S+), group (\w+)")
{}
"""


_VALUES = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.JoinedStr, ast.BinOp)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of names that a module assigns or imports from the package."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lightning_sm":
            path = _PACKAGE.parent / f"{(node.module or '').replace('.', '/')}.py"
            known = _constants(_tree(path)) if path.is_file() else {}
            found |= {alias.asname or alias.name: known[alias.name] for alias in node.names if alias.name in known}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    found |= {one.id: value for one, value in zip(target.elts, node.value.elts, strict=True)}
                elif isinstance(target, ast.Name):
                    found[target.id] = node.value
    return {name: value for name, value in found.items() if isinstance(value, _VALUES)}


def _is_phrase(node: ast.AST, constants: dict[str, ast.expr]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in constants:
            others = {name: value for name, value in constants.items() if name != part.id}
            if _is_phrase(constants[part.id], others):
                return True
        elif isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes)):
            value = part.value if isinstance(part.value, str) else part.value.decode("latin-1")
            if _PHRASE.search(value):
                return True
    return False


def _is_text(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name in _TEXTS


def _is_decision(node: ast.AST, constants: dict[str, ast.expr]) -> bool:
    """Return whether an expression cuts, searches or compares a text for people."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, method = node.func.value, node.func.attr
        has_phrase = any(_is_phrase(one, constants) for one in node.args)
        if getattr(owner, "id", None) == "re" or method in _PATTERNS - _CUTS:
            return any(map(_is_text, node.args)) or (has_phrase and getattr(owner, "id", None) == "re")
        return (method in _CUTS and _is_text(owner)) or (method in _CUTS | _SEARCHES and has_phrase)
    if isinstance(node, ast.Compare):
        is_in_text = isinstance(node.ops[0], (ast.In, ast.NotIn)) and _is_text(node.comparators[0])
        values = [value for value in (node.left, *node.comparators) if not isinstance(value, ast.Attribute)]
        return is_in_text or any(_is_phrase(value, constants) for value in values)
    return False


def _decisions(tree: ast.Module) -> Iterator[str]:
    """Yield each decision: the constant that it defines, or else its source."""
    constants = _constants(tree)
    for statement in tree.body:
        for node in ast.walk(statement):
            if _is_decision(node, constants):
                yield ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else node)


def test_no_text_for_people_decides():
    """The table lists exactly the expressions that cut, search or compare text for people."""
    found = {
        path.relative_to(_PACKAGE).as_posix(): set(_decisions(_tree(path))) for path in sorted(_PACKAGE.rglob("*.py"))
    }
    assert {file: names for file, names in found.items() if names} == {
        file: set(reasons) for file, reasons in _EXCEPTIONS.items()
    }


@pytest.mark.parametrize(
    "decision",
    [
        "job.reason.startswith(HANG)",
        "reason.startswith(HANG)",
        "report.startswith(DATA_WAIT)",
        "line.startswith(_ALONE_START)",
        "beat.phase.startswith('failed with ')",
        "first.endswith('last lines of stderr:')",
        "failure_reason(tail, 2).removeprefix('error: ')",
        "why.removeprefix('lightning-sm: error: ')",
        "words.endswith('fast')",
        "rank.rpartition(' on ')",
        "text.partition(f'\\n{_TRACEBACK}\\n')",
        "outcome in _SUCCESSES",
        "program.origin == 'hyperparameter sagemaker_program'",
        "section.title != 'Where the time went'",
        "'the stop was first' in said",
        "re.search('no progress on host', said)",
        "_BANNER.match(line.text)",
    ],
)
def test_what_once_decided_would_be_found(decision):
    """Each decision was once in the package, or resembles one that was."""
    assert decision in set(_decisions(ast.parse(_ONCE.format(decision))))
    assert not set(_decisions(ast.parse("outcome.kind is OutcomeKind.HANG\npath.endswith('.ckpt')\n'a' in names")))
