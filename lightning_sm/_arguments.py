"""Argument parsers for the commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_sm._text import closest

# Completion functions for each shell, keyed by metavar, in the form that shtab accepts.
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files"}
_FOLDERS = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/"}
_COMPLETED = {"FILE": _FILES, "PATH": _FILES, "DIR": _FOLDERS, "JOB.yaml": _FILES}


class CommandParser(argparse.ArgumentParser):
    """An argument parser that suggests a similar option if an option is unknown.

    Args:
        args: Arguments of ``ArgumentParser``.
        kwargs: Keyword arguments of ``ArgumentParser``. ``allow_abbrev`` defaults to False, because abbreviations break
            when options are added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    @property
    def option_names(self) -> list[str]:
        """The names of the options, with their dashes."""
        return list(self._option_string_actions)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments, and reject unknown ones here, where similar options can be suggested.

        ``argparse`` also calls this method for each subcommand; on its own, it would reject unknown arguments only at
        the end.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, []

    def mark_completions(self) -> None:
        """Tell shtab which values are files and which are folders, judging by their metavars."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in dict.fromkeys(action.choices.values()):
                    if isinstance(parser, CommandParser):
                        parser.mark_completions()
            elif action.metavar in _COMPLETED:
                action.complete = _COMPLETED[action.metavar]  # type: ignore[attr-defined]

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not options:
            self.error(f"unexpected arguments: {' '.join(unknown)}")
        self.error(f"unknown option {options[0]}.{did_you_mean(options[0], self.option_names)}")


def did_you_mean(word: str, names: Sequence[str]) -> str:
    """Return a sentence, with a leading space, that suggests a similar name; empty if no name is similar."""
    close = closest(word, names)
    return f" Did you mean {close}?" if close else ""


def positive_whole_number(text: str) -> int:
    """Parse a whole number above zero, as a ``type`` for ``argparse``.

    Raises:
        argparse.ArgumentTypeError: The text is not a positive whole number.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)
