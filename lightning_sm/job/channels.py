"""Routing of input channels to arguments, based only on their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lightning_sm.errors import ChannelError

# Names that SageMaker's examples use for the only channel or the main one.
_MAIN_CHANNELS = ("training", "train")
# Parameter names that LightningDataModules and torchvision datasets use for the data folder.
_MAIN_PARAMETERS = ("data_dir", "root")
# Names for each split of the data, in channels and parameters. SageMaker's built-in algorithms use "train",
# "validation" and "test".
_SPLITS = (_MAIN_CHANNELS, ("val", "validation", "valid"), ("test", "testing"))
# The channel that holds configuration files instead of data (see ``hyperparameters.to_argv``).
CONFIG_CHANNEL = "config"


@dataclass(frozen=True)
class Routing:
    """The assignment of channels to arguments.

    Attributes:
        channel_of: Channel name by argument key (``data.data_dir``, ``model.weights``).
        unused: Channels that match no argument.
    """

    channel_of: Mapping[str, str]
    unused: tuple[str, ...]


def route(
    channels: Iterable[str], parameters: Collection[str], mapping: Mapping[str, str], *, all_channels_known: bool = True
) -> Routing:
    """Assign each channel to an argument.

    Entries of ``mapping`` take precedence. Otherwise, channel ``x`` goes to the DataModule's parameter ``x_dir``, where
    ``x`` may also be another name for the same split: ``train`` and ``training``; ``val``, ``validation`` and
    ``valid``; ``test`` and ``testing``. Failing that, ``training``, ``train`` or the only channel goes to ``data_dir``
    or ``root``.

    Args:
        channels: Names of this host's channels.
        parameters: Names of the DataModule's parameters.
        mapping: Channel name to argument: a parameter of the DataModule, or a dotted key such as ``model.weights``.
        all_channels_known: False in a heterogeneous job, where other groups may have channels that this host lacks.

    Raises:
        ChannelError: ``mapping`` names a nonexistent channel or parameter, or maps two channels to one argument.
    """
    names = [name for name in channels if name != CONFIG_CHANNEL or name in mapping]
    unknown = sorted(set(mapping) - set(names))
    if unknown and all_channels_known:
        raise ChannelError(
            f"SageMakerCLI(channels=...) maps the channels {unknown}, but the job has the channels {sorted(names)}. "
            f"Add fit(inputs={{{unknown[0]!r}: ...}}), or remove the channel from SageMakerCLI(channels=...)."
        )
    channel_of: dict[str, str] = {}
    unused = []
    # Assign mapped channels first, then channels with a parameter of the same name; the other channels get the
    # parameters that remain.
    for name in sorted(names, key=lambda name: (name not in mapping, f"{_identifier(name)}_dir" not in parameters)):
        if name in mapping:
            key = _mapped_key(name, mapping[name], parameters)
            if key in channel_of:
                raise ChannelError(f"Channels {channel_of[key]!r} and {name!r} are both mapped to {key!r}.")
            channel_of[key] = name
            continue
        free = [key for key in _fitting_keys(name, names, parameters) if key not in channel_of]
        if free:
            channel_of[free[0]] = name
        else:
            unused.append(name)
    return Routing(channel_of, tuple(unused))


def may_be_folder(parameter: str) -> bool:
    """Return whether a DataModule parameter with this name may receive a channel."""
    return parameter in _MAIN_PARAMETERS or parameter.endswith("_dir")


def _identifier(channel: str) -> str:
    return channel.replace("-", "_").replace(".", "_")


def _mapped_key(channel: str, target: str, parameters: Collection[str]) -> str:
    if "." not in target and target not in parameters:
        raise ChannelError(
            f"Channel {channel!r} is mapped to {target!r}, but the DataModule has the parameters {sorted(parameters)}. "
            "Name one of them, or a dotted key such as 'model.weights'."
        )
    return _key(target)


def _key(target: str) -> str:
    """Return the argument key for a mapping's target, without ``init_args``."""
    if "." not in target:
        return f"data.{target}"
    return ".".join(part for part in target.split(".") if part not in ("", "init_args"))


def _fitting_keys(channel: str, channels: Collection[str], parameters: Collection[str]) -> list[str]:
    """Return the keys to which a channel may be assigned, best match first."""
    same_split = next((names for names in _SPLITS if channel in names), ())
    folders = [f"{name}_dir" for name in (_identifier(channel), *same_split)]
    if channel in _MAIN_CHANNELS or len(channels) == 1:
        folders += [name for name in _MAIN_PARAMETERS if name in parameters][:1]
    return [f"data.{folder}" for folder in folders if folder in parameters]
