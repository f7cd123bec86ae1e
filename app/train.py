"""Train ResNet-18 to classify small images: handwritten digits by default, or CIFAR-10.

The digits (1,797 scans, 10 classes) come with scikit-learn, so the first command below works without a download. It
takes about a minute on one CPU core and reaches a validation accuracy of at least 97%. CIFAR-10 is downloaded on
first use and needs a GPU.

On a laptop, on all of its GPUs or on its CPU:
  python app/train.py fit --config app/configs/digits.yaml
  python app/train.py fit --config app/configs/cifar10.yaml --data.data_dir outputs/cifar10

On an emulated SageMaker cluster of two trainer hosts, each a process on this machine:
  lightning-sm local --group trainer=2 -- app/train.py fit --config app/configs/digits.yaml

To evaluate a saved model on images it has never seen:
  python app/train.py test --config app/configs/digits.yaml --ckpt_path PATH_TO_CHECKPOINT.ckpt

On SageMaker, the job's hyperparameters take the place of these arguments. "fit --help" lists all arguments, and
"fit --data.help DigitsDataModule" the arguments of the data.
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
    # "python app/train.py" puts app/ on sys.path, but the imports below need its parent.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The command line accepts the bare class names of data modules that are imported here.
from app.cifar10 import CIFAR10DataModule
from app.digits import DigitsDataModule
from app.model import ResNet18Classifier

__all__ = ["AppCLI", "CIFAR10DataModule", "DigitsDataModule", "ResNet18Classifier", "main"]


class AppCLI(SageMakerCLI):
    """The command line, which passes the number of classes from the data to the model."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the default data, and link the model to the data."""
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"data": {"class_path": f"{DigitsDataModule.__module__}.{DigitsDataModule.__qualname__}"}})
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """A formatter that keeps the line breaks of the description, so its commands stay on one line."""


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
