"""The parser of a script's command line, inferred from the script's source text."""

from __future__ import annotations

import re
from enum import Enum

from lightning_sm.launcher.user_code.script import Script

_HYDRA = re.compile(r"^\s*@hydra\.main\b", re.MULTILINE)
_CLI = re.compile(r"\bSageMakerCLI\b")
# Other readers of the command line: imported parsers, ``sys.argv``, and the CLI's argument ``args=``.
_OTHERS = re.compile(
    r"^\s*(?:import|from)\b.*\b(?:absl|argh|argparse|cleo|click|docopt|fire|getopt|hydra|jsonargparse|optparse|plac|"
    r"simple_parsing|tap|typer|tyro)\b|\bargv\b|\bargs\s*=",
    re.MULTILINE,
)


class Parser(Enum):
    """The parser of a script's command line."""

    SAGEMAKER_CLI = "SageMakerCLI"
    HYDRA = "Hydra"
    OTHER = "another parser, or unknown"


def parser_of(script: Script) -> Parser:
    """Return the parser that reads a script's command line.

    Only the script's file is searched. The script is a Hydra script if a function is decorated with ``hydra.main``, and
    a CLI script if the file names ``SageMakerCLI`` and no other reader of the command line.

    Args:
        script: The script.
    """
    if not script.is_python:
        return Parser.OTHER
    text = script.path.read_text(encoding="utf-8", errors="replace")
    if _HYDRA.search(text):
        return Parser.HYDRA
    return Parser.SAGEMAKER_CLI if _CLI.search(text) and not _OTHERS.search(text) else Parser.OTHER
