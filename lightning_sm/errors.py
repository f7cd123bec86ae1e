"""Every error that lightning_sm raises on purpose.

The tree::

    LightningSMError
    |- JobConfigError(ValueError)        a SageMaker file, variable or setting is malformed
    |- TopologyError(ValueError)         groups, hosts or Trainer settings contradict each other
    |- HyperparameterError(ValueError)   hyperparameters.json cannot become a command line
    |- ChannelError(ValueError)          a channel mapping names what does not exist
    |- ScriptError(ValueError)           the training script cannot be found or started
    |- HostResolutionError(TimeoutError) a host name never resolved
    |- PortInUseError(OSError)           the main port is taken
    |- OutputDirectoryError(OSError)     an output directory cannot be written
    `- MixedLightningError(ImportError)  pytorch_lightning and lightning.pytorch classes were mixed

Every error can be built from one string: PyTorch re-raises worker errors as ``type(error)(message)``.
"""

from __future__ import annotations


class LightningSMError(Exception):
    """Base class of every error that lightning_sm raises on purpose."""


class JobConfigError(LightningSMError, ValueError):
    """A SageMaker file, environment variable or setting is malformed or missing."""


class TopologyError(LightningSMError, ValueError):
    """Instance groups, hosts or Trainer settings contradict each other."""


class HyperparameterError(LightningSMError, ValueError):
    """A hyperparameter cannot be turned into command line arguments."""


class ChannelError(LightningSMError, ValueError):
    """A channel mapping names a channel or an argument that does not exist."""


class ScriptError(LightningSMError, ValueError):
    """The training script cannot be found or started."""


class HostResolutionError(LightningSMError, TimeoutError):
    """The name of a host did not resolve before the deadline."""


class PortInUseError(LightningSMError, OSError):
    """The port on which rank 0 must listen is taken by another process."""


class OutputDirectoryError(LightningSMError, OSError):
    """A directory that the job must write to cannot be written."""


class MixedLightningError(LightningSMError, ImportError):
    """Classes of pytorch_lightning and of lightning.pytorch were mixed in one script."""
