"""SageMaker local mode with instance groups: CPU and GPU groups of one job as containers on this machine.

The local mode of SDK v2 ends in ``KeyError: 'InstanceType'`` for ``instance_groups``, and gives every channel to every
host. ``HeterogeneousLocalSession`` replaces the three places where it does so; all else is the SDK's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sm.job.emulated_service import GroupSpec, deal_hosts, group_of, resource_config_of
from lightning_sm.submit.sdk.v2_internals import Method, changed_sdk, check_attributes, check_methods, missing_sdk
from lightning_sm.submit.sdk.v2_local_groups import check_supported, groups_by_channel, requested_groups

try:
    from sagemaker.local import LocalSession
    from sagemaker.local.entities import _LocalTrainingJob
    from sagemaker.local.image import _SageMakerContainer, _Volume
    from sagemaker.local.local_session import LocalSagemakerClient
except ImportError as error:
    raise missing_sdk(error) from error

_MODEL_DIR = "/opt/ml/model"
_CHANNELS_DIR = "/opt/ml/input/data/"

# All that is overridden or called below, as it is from sagemaker 2.257.1 to 2.257.7.
_METHODS = (
    Method(LocalSagemakerClient, "__init__", ("self", "sagemaker_session")),
    Method(
        LocalSagemakerClient,
        "create_training_job",
        (
            "self",
            "TrainingJobName",
            "AlgorithmSpecification",
            "OutputDataConfig",
            "ResourceConfig",
            "InputDataConfig",
            "Environment",
            "kwargs",
        ),
    ),
    Method(_LocalTrainingJob, "__init__", ("self", "container")),
    Method(
        _LocalTrainingJob,
        "start",
        ("self", "input_data_config", "output_data_config", "hyperparameters", "environment", "job_name"),
    ),
    Method(
        _SageMakerContainer,
        "__init__",
        (
            "self",
            "instance_type",
            "instance_count",
            "image",
            "sagemaker_session",
            "container_entrypoint",
            "container_arguments",
        ),
    ),
    Method(_SageMakerContainer, "write_config_files", ("self", "host", "hyperparameters", "input_data_config")),
    Method(
        _SageMakerContainer,
        "_create_docker_host",
        ("self", "host", "environment", "optml_subdirs", "command", "volumes"),
    ),
    Method(_Volume, "__init__", ("self", "host_dir", "container_dir", "channel")),
)


class HeterogeneousLocalSession(LocalSession):  # type: ignore[misc]  # the SDK has no types
    """A ``LocalSession`` that also runs jobs with ``instance_groups``, as containers on this machine.

    ::

        session = HeterogeneousLocalSession()
        session.config = {"local": {"local_code": True}}
        Estimator(
            image_uri="my-image",
            role="arn:aws:iam::111111111111:role/unused",
            instance_groups=[InstanceGroup("data", "ml.c5.xlarge", 1), InstanceGroup("trainer", "ml.g5.xlarge", 2)],
            sagemaker_session=session,
            output_path="file:///tmp/output",
        ).fit({"training": TrainingInput("file:///tmp/data", instance_groups=["data"])})

    Jobs without instance groups run as in ``LocalSession``. In both, two things are as on the service rather than as
    in the SDK: ``resourceconfig.json`` names the groups and their hosts, which are dealt out at random; and each host
    has a model folder of its own, whose files meet in one ``model.tar.gz``.

    Instance types are labels, from which the hosts take their roles; no container sees a GPU. A group of the type
    ``local_gpu`` gives each of its containers all GPUs of this machine, as the SDK does for a single host; to give
    them to groups of other types, too, set ``container_config`` in ``session.config["local"]``: it goes into the
    Compose file of every container.

    As in ``LocalSession``, the first container that ends makes Compose end all others, with SIGTERM and, 10 s later,
    SIGKILL (``container_config={"stop_grace_period": "120s"}`` makes it 120 s), and ``fit`` may return as if nothing
    had happened when another container failed. The hosts of ``lightning-sm train`` leave together after a success of
    all, and the one that failed leaves first.

    Args:
        boto_session: The boto3 session. Default: one made from the environment, which must name a region.
        seed: Decides which host lands in which group; None for another draw in each job, as on the service.
        settings: Further arguments of ``LocalSession``.

    Raises:
        SDKError: The installed SDK is inside not what this class was written for.

    Source:
        sagemaker 2.257.7, ``local/local_session.py`` (``create_training_job``) and ``local/image.py``.
    """

    def __init__(self, boto_session: Any = None, *, seed: int | None = None, **settings: Any) -> None:
        check_methods(_METHODS)
        check_attributes(_Volume("/host", "/container"), ["container_dir"])
        super().__init__(boto_session, **settings)
        check_attributes(self, ["sagemaker_client"])
        self.sagemaker_client = _Client(self, seed)


class _Client(LocalSagemakerClient):  # type: ignore[misc]  # the SDK has no types
    def __init__(self, sagemaker_session: LocalSession, seed: int | None) -> None:
        super().__init__(sagemaker_session)
        check_attributes(self, ["_training_jobs"])
        self._seed = seed

    def create_training_job(
        self,
        *,
        TrainingJobName: str,  # noqa: N803 - boto3's names
        AlgorithmSpecification: Mapping[str, Any],  # noqa: N803
        OutputDataConfig: Mapping[str, Any],  # noqa: N803
        ResourceConfig: Mapping[str, Any],  # noqa: N803
        InputDataConfig: Sequence[dict[str, Any]] | None = None,  # noqa: N803
        Environment: Mapping[str, str] | None = None,  # noqa: N803
        **kwargs: Any,
    ) -> None:
        """Run a training job to its end, as the SDK's method does, whose container class cannot be replaced.

        Raises:
            TopologyError: The groups are malformed.
            ChannelError: A channel is meant for a group that does not exist.
            JobConfigError: A job with groups asks for what local mode cannot do.
        """
        channels = InputDataConfig or []
        specs = requested_groups(ResourceConfig)
        if "InstanceGroups" in ResourceConfig:
            check_supported(kwargs, channels, AlgorithmSpecification)
        container = _Container(
            AlgorithmSpecification["TrainingImage"],
            specs,
            groups_by_channel(channels, specs),
            seed=self._seed,
            sagemaker_session=self.sagemaker_session,
        )
        container.container_entrypoint = AlgorithmSpecification.get("ContainerEntrypoint")
        container.container_arguments = AlgorithmSpecification.get("ContainerArguments")
        job = _LocalTrainingJob(container)
        hyperparameters = kwargs.get("HyperParameters", {})
        job.start(channels, OutputDataConfig, hyperparameters, Environment or {}, TrainingJobName)
        # Where describe_training_job looks, which tells the Estimator where the model is.
        self._training_jobs[TrainingJobName] = job


class _Container(_SageMakerContainer):  # type: ignore[misc]  # the SDK has no types
    """All containers of one job."""

    def __init__(
        self,
        image: str,
        specs: Sequence[GroupSpec],
        channel_groups: Mapping[str, frozenset[str]],
        *,
        seed: int | None,
        sagemaker_session: LocalSession,
    ) -> None:
        num_hosts = sum(spec.num_hosts for spec in specs)
        super().__init__(specs[0].instance_type, num_hosts, image, sagemaker_session=sagemaker_session)
        check_attributes(self, ["container_arguments", "container_entrypoint", "container_root", "hosts"])
        if len(self.hosts) != num_hosts:
            raise changed_sdk([f"{num_hosts} hosts were asked for, and {self.hosts} were made"])
        # A text as the seed: whole numbers that are close to each other have similar first draws.
        draw = random.Random(None if seed is None else f"{seed} groups")  # noqa: S311 - no secret
        self._groups = deal_hosts(specs, self.hosts, draw)
        self._channel_groups = channel_groups

    def write_config_files(
        self, host: str, hyperparameters: Mapping[str, str], input_data_config: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the files of a host: its own channels only, and the groups as the service writes them."""
        own = [channel for channel in input_data_config if self._sees(host, channel["ChannelName"])]
        super().write_config_files(host, hyperparameters, own)
        path = self._folder(host) / "input" / "config" / "resourceconfig.json"
        written = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**written, **resource_config_of(self._groups, host)}), encoding="utf-8")

    def _create_docker_host(
        self, host: str, environment: Sequence[str], optml_subdirs: set[str], command: str, volumes: Sequence[Any]
    ) -> dict[str, Any]:
        own = [self._own_model_volume(host)]
        for volume in volumes:
            channel = volume.container_dir.removeprefix(_CHANNELS_DIR)
            if channel in self._channel_groups and not self._sees(host, channel):
                # The SDK has made a mount point, which would look like an empty channel.
                (self._folder(host) / "input" / "data" / channel).rmdir()
            elif volume.container_dir != _MODEL_DIR:
                own.append(volume)
        # The SDK gives GPUs to a container if this is "local_gpu".
        self.instance_type = group_of(self._groups, host).instance_type
        described: dict[str, Any] = super()._create_docker_host(host, environment, optml_subdirs, command, own)
        return described

    def _own_model_volume(self, host: str) -> Any:
        folder = self._folder(host) / "model"
        folder.mkdir(exist_ok=True)
        return _Volume(str(folder), _MODEL_DIR)

    def _folder(self, host: str) -> Path:
        return Path(self.container_root) / host

    def _sees(self, host: str, channel: str) -> bool:
        return group_of(self._groups, host).name in self._channel_groups[channel]
