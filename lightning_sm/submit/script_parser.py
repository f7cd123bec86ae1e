"""Run a training script until it has parsed its command line, and no further: the process ends there.

``python -m lightning_sm.submit.script_parser SCRIPT [ARGUMENTS]``. A script with a ``LightningCLI`` is stopped before
it makes model, data and trainer, others when their parser returns.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import jsonargparse

from lightning_sm.submit.parser_exit_codes import NOT_PARSED, PARSED


def main(script: str, arguments: list[str]) -> int:
    """Run the script; return only if it ends without having parsed anything.

    Args:
        script: Its path.
        arguments: Its command line.
    """
    _stop_after_parsing()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as "python SCRIPT" does
    runpy.run_path(script, run_name="__main__")
    return NOT_PARSED


def _stop_after_parsing() -> None:
    # LightningCLI checks and completes the configuration after parse_args; then it makes the classes. The name of the
    # method changed in jsonargparse 4.49.
    for name in ("instantiate", "instantiate_classes"):
        if hasattr(jsonargparse.ArgumentParser, name):
            setattr(jsonargparse.ArgumentParser, name, _stop)
    _stop_after(jsonargparse.ArgumentParser, "parse_args", unless=_is_of_lightning)
    _stop_after(argparse.ArgumentParser, "parse_args", unless=_is_jsonargparse)
    # parse_args calls it, and then refuses what it has left over.
    _stop_after(argparse.ArgumentParser, "parse_known_args", unless=_is_within_parse_args)


def _stop(*_: object, **__: object) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PARSED)  # no destructor or exit handler of the script runs


def _stop_after(owner: type, name: str, unless: Callable[[Any], bool]) -> None:
    method = getattr(owner, name)

    def parse(parser: Any, *args: Any, **kwargs: Any) -> Any:
        _running.append(name)
        try:
            result = method(parser, *args, **kwargs)
        finally:
            _running.pop()
        if not unless(parser):
            _stop()
        return result

    setattr(owner, name, parse)


_running: list[str] = []


def _is_jsonargparse(parser: Any) -> bool:
    return isinstance(parser, jsonargparse.ArgumentParser)


def _is_of_lightning(parser: Any) -> bool:
    return any(kind.__name__ == "LightningArgumentParser" for kind in type(parser).__mro__)


def _is_within_parse_args(parser: Any) -> bool:
    return _is_jsonargparse(parser) or "parse_args" in _running


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
