r"""Train a small transformer to predict the next byte of a text: English prose that comes with Python.

The text is Python's help() on the language itself, so the first command below works without a download. It takes about
half a minute on one CPU core.

On a laptop, on all of its GPUs or on its CPU:
  python app/train_text.py fit --config app/configs/transformer.yaml

On an emulated SageMaker cluster of two trainer hosts, each a process on this machine:
  lightning-sm local --group trainer=2 -- app/train_text.py fit --config app/configs/transformer.yaml

A larger model, on your own text:
  python app/train_text.py fit --config app/configs/transformer.yaml --data.data_dir FOLDER_OF_TXT_FILES \
    --data.context 256 --model.width 512 --model.num_blocks 12 --model.num_heads 8 --model.learning_rate 3e-4
"""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from jsonargparse import DefaultHelpFormatter
from pytorch_lightning.cli import LightningArgumentParser

from lightning_sm import SageMakerCLI

if not __package__:
    # "python app/train_text.py" puts app/ on sys.path, but the imports below need its parent.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.text import TextDataModule
from app.transformer import TransformerLanguageModel

__all__ = ["TextCLI", "TextDataModule", "TransformerLanguageModel", "main"]


class TextCLI(SageMakerCLI):
    """The command line, which passes the number of tokens and the window length from the data to the model."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the model to the data."""
        super().add_arguments_to_parser(parser)
        parser.link_arguments("data.num_tokens", "model.num_tokens", apply_on="instantiate")
        parser.link_arguments("data.context", "model.context", apply_on="instantiate")


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """A formatter that keeps the line breaks of the description, so its commands stay on one line."""


def main() -> None:
    """Parse the command line and run the subcommand."""
    TextCLI(
        TransformerLanguageModel,
        TextDataModule,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"description": __doc__, "formatter_class": _HelpFormatter},
    )


if __name__ == "__main__":
    main()
