"""Train ResNet-18 to classify small images: handwritten digits by default, or CIFAR-10.

The digits (1,797 scans, 10 classes) come with scikit-learn, so that the first line below runs as it is. It takes
about a minute on one CPU core and ends with 97 % or more of the validation images right. CIFAR-10 is
downloaded on first use, and wants a GPU.

On a laptop, on all GPUs that it has, or on its CPU:
  python app/train.py fit --config app/configs/digits.yaml
  python app/train.py fit --config app/configs/cifar10.yaml --data.data_dir outputs/cifar10

On an emulated SageMaker cluster of two training hosts, each a process of this machine:
  lightning-sm local --group trainer=2 -- app/train.py fit --config app/configs/digits.yaml

What a saved model says of images that it has never seen:
  python app/train.py test --config app/configs/digits.yaml --ckpt_path PATH_TO_CHECKPOINT.ckpt

On SageMaker the same arguments are the job's hyperparameters. "fit --help" lists all of them, and
"fit --data.help DigitsDataModule" those of the data.
"""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from jsonargparse import DefaultHelpFormatter
from pytorch_lightning import LightningDataModule
from pytorch_lightning.cli import LightningArgumentParser

from lightning_sm import SageMakerCLI

if not __package__:
    # "python app/train.py" puts app/ on the path and not the folder that holds it, which "python -m app.train" does.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Importing the data modules makes them known by their short names.
from app.cifar10 import CIFAR10DataModule
from app.digits import DigitsDataModule
from app.model import ResNet18Classifier

__all__ = ["AppCLI", "CIFAR10DataModule", "DigitsDataModule", "ResNet18Classifier", "main"]


class AppCLI(SageMakerCLI):
    """The command line, which passes the number of classes from the data to the model."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the default data, and link the model to the data.

        Args:
            parser: The parser of one subcommand.
        """
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"data": {"class_path": f"{DigitsDataModule.__module__}.{DigitsDataModule.__qualname__}"}})
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description, hence its command lines whole."""


def main() -> None:
    """Parse the command line and run the subcommand."""
    AppCLI(
        ResNet18Classifier,
        LightningDataModule,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"description": __doc__, "formatter_class": _HelpFormatter},
    )


if __name__ == "__main__":
    main()
