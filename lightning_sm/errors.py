"""The errors that lightning_sm raises on purpose.

The tree::

    LightningSMError
    |- JobConfigError(ValueError)        a SageMaker file, variable or setting is malformed
    |- TopologyError(ValueError)         groups, hosts or Trainer settings contradict each other
    |- StrategyError(ValueError)         a strategy does not support this job or model
    |- HyperparameterError(ValueError)   hyperparameters.json cannot become a command line
    |- ChannelError(ValueError)          a channel mapping names a channel or argument that does not exist
    |- ScriptError(ValueError)           the training script cannot be found or started
    |- HostResolutionError(TimeoutError) a host name did not resolve in time
    |- PortInUseError(OSError)           the main port is taken
    |- OutputDirectoryError(OSError)     an output directory or file cannot be written
    |- CheckpointError(OSError)          a checkpoint could not be written
    |  `- CheckpointMismatchError(ValueError)  a checkpoint does not belong to the script's model
    |- SubmitError(ValueError)           a job cannot be submitted: wrong description, or something is missing locally
    |- AWSError(RuntimeError)            AWS rejects a request, cannot be reached, or has no such job
    |- MixedLightningError(ImportError)  pytorch_lightning and lightning.pytorch classes were mixed
    |- SDKError(ImportError)             boto3, AWS's SDK, is missing
    |- ContainerError(RuntimeError)      Docker is missing, refuses a container, or does not answer
    |- NeedsLinuxError(RuntimeError)     the feature needs Linux, and this system is not Linux
    `- DataServiceError                  the data service cannot continue
       |- DataSettingsError(ValueError)       a setting is wrong, or a DataModule cannot be served
       |- DataHostUnreachableError(ConnectionError)  no data host can be reached
       |- DataTimeoutError(TimeoutError)      a batch did not arrive in time
       |- DataHostMismatchError(ValueError)   a data host's job, version, token or dataset differs from its peers'
       |- RemoteTransformError(RuntimeError)  the user's code failed on a data host
       |  `- RemoteImportError(ImportError)      the user's code cannot be imported there
       |- BatchTypeError(TypeError)           a batch holds something that cannot be sent
       |- BatchTooLargeError(ValueError)      a batch does not fit into a slot of the ring
       |- WireError(ValueError)               a message breaks the protocol
       `- ResumeError(ValueError)             a checkpoint's data position does not fit the data

Every error can be built from one string, because PyTorch re-raises worker errors as ``type(error)(message)``.
"""

from __future__ import annotations


class LightningSMError(Exception):
    """Base class of every error that lightning_sm raises on purpose."""


class JobConfigError(LightningSMError, ValueError):
    """A SageMaker file, environment variable or setting is malformed or missing."""


class TopologyError(LightningSMError, ValueError):
    """Instance groups, hosts or Trainer settings contradict each other."""


class StrategyError(LightningSMError, ValueError):
    """A strategy does not support the job's library, hosts, devices or model."""


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
    """An output directory or file cannot be written."""


class CheckpointError(LightningSMError, OSError):
    """A checkpoint could not be written; an earlier one of the same name is intact."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint from which a job resumes does not belong to the script's model or optimizer."""


class SubmitError(LightningSMError, ValueError):
    """A job cannot be submitted: its description is wrong, or something is missing on this machine."""


class AWSError(LightningSMError, RuntimeError):
    """AWS rejects a request, cannot be reached, or does not have the named job or file."""


class MixedLightningError(LightningSMError, ImportError):
    """Classes of pytorch_lightning and of lightning.pytorch were mixed in one script."""


class SDKError(LightningSMError, ImportError):
    """boto3, AWS's SDK, is not installed."""


class ContainerError(LightningSMError, RuntimeError):
    """Docker is missing, does not have the image, refuses a container of an emulated job, or does not answer."""


class NeedsLinuxError(LightningSMError, RuntimeError):
    """The feature needs Linux, and this system is not Linux."""


class DataServiceError(LightningSMError):
    """The data service cannot continue."""


class DataSettingsError(DataServiceError, ValueError):
    """A setting of the data service is wrong, or a DataModule cannot be served."""


class DataHostUnreachableError(DataServiceError, ConnectionError):
    """No data host can be reached."""


class DataTimeoutError(DataServiceError, TimeoutError):
    """A batch, or a loader's description, did not arrive before its deadline."""


class DataHostMismatchError(DataServiceError, ValueError):
    """A data host's job, version or data differs from that of its peers."""


class RemoteTransformError(DataServiceError, RuntimeError):
    """The user's dataset, transform, sampler, collate function or hook raised an exception on a data host.

    The message contains that exception's type, message, place and traceback (see data/protocol/failures.py).
    """


class RemoteImportError(RemoteTransformError, ImportError):
    """A data host cannot import or compile a module that the user's code needs."""


class BatchTypeError(DataServiceError, TypeError):
    """A batch holds an object that cannot be sent; the message names its path in the batch."""


class BatchTooLargeError(DataServiceError, ValueError):
    """A batch does not fit into a slot of the ring."""


class WireError(DataServiceError, ValueError):
    """A message from the network, or from another process of the data service, breaks the protocol."""


class ResumeError(DataServiceError, ValueError):
    """The data position of a checkpoint does not fit the data of this run."""
