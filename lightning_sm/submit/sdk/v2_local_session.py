"""SageMaker local mode with instance groups: the CPU and GPU groups of a job as containers on this machine.

The local mode of SDK v2 fails with ``KeyError: 'InstanceType'`` for ``instance_groups``, and gives every channel to
every host. ``HeterogeneousLocalSession`` replaces the three classes that do so; everything else is the SDK's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sm.job.emulated_service import GroupSpec, deal_hosts, group_of, resource_config_of
from lightning_sm.submit.sdk.v2_internals import Method, check_methods, missing_sdk
from lightning_sm.submit.sdk.v2_local_groups import check_no_pipe, groups_by_channel, requested_groups

try:
    from sagemaker.local import LocalSession
    from sagemaker.local.entities import _LocalTrainingJob
    from sagemaker.local.image import _SageMakerContainer, _Volume
    from sagemaker.local.local_session import LocalSagemakerClient
except ImportError as error:
    raise missing_sdk(error) from error

_MODEL_DIR = "/opt/ml/model"
_CHANNELS_DIR = "/opt/ml/input/data/"

# Everything that is overridden or called below, as in sagemaker 2.257.1 to 2.257.7.
_METHODS = (
    Method(LocalSagemakerClient, "__init__", "self, sagemaker_session"),
    Method(
        LocalSagemakerClient,
        "create_training_job",
        "self, TrainingJobName, AlgorithmSpecification, OutputDataConfig, ResourceConfig, InputDataConfig, "
        "Environment, kwargs",
    ),
    Method(_LocalTrainingJob, "__init__", "self, container"),
    Method(
        _LocalTrainingJob,
        "start",
        "self, input_data_config, output_data_config, hyperparameters, environment, job_name",
    ),
    Method(
        _SageMakerContainer,
        "__init__",
        "self, instance_type, instance_count, image, sagemaker_session, container_entrypoint, container_arguments",
    ),
    Method(_SageMakerContainer, "write_config_files", "self, host, hyperparameters, input_data_config"),
    Method(_SageMakerContainer, "_create_docker_host", "self, host, environment, optml_subdirs, command, volumes"),
    Method(_Volume, "__init__", "self, host_dir, container_dir, channel"),
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

    Jobs without instance groups run as in ``LocalSession``. With and without groups, two things are as on the service
    rather than as in the SDK: ``resourceconfig.json`` lists the groups and their hosts, which are assigned at random;
    and each host has its own model folder, whose files are combined in one ``model.tar.gz``.

    Instance types only decide the roles of the hosts; no container sees a GPU. In a group of the type ``local_gpu``
    each container sees all GPUs of this machine, as the SDK does for a single host. To make them visible in other
    groups, set ``container_config`` in ``session.config["local"]``: it is added to every container in the Compose file.

    As in ``LocalSession``, Compose stops all containers when the first one ends, with SIGTERM and, 10 s later, SIGKILL
    (``container_config={"stop_grace_period": "120s"}`` waits 120 s), and ``fit`` may return normally although another
    container failed. Hosts that run ``lightning-sm train`` exit together after success, and a failed host exits first.

    Args:
        boto_session: The boto3 session. Default: one that is created from the environment, which must name a region.
        seed: Seed of the assignment of hosts to groups; None for a different one in each job, as on the service.
        settings: Further arguments of ``LocalSession``.

    Raises:
        SDKError: The internals of the installed SDK differ from those that this class was written for.

    Source:
        sagemaker 2.257.7, ``local/local_session.py`` (``create_training_job``) and ``local/image.py``.
    """

    def __init__(self, boto_session: Any = None, *, seed: int | None = None, **settings: Any) -> None:
        check_methods(_METHODS)
        super().__init__(boto_session, **settings)
        self.sagemaker_client = _LocalClient(self, seed)


class _LocalClient(LocalSagemakerClient):  # type: ignore[misc]  # the SDK has no types
    def __init__(self, sagemaker_session: LocalSession, seed: int | None) -> None:
        super().__init__(sagemaker_session)
        self._seed = seed

    def create_training_job(self, **request: Any) -> None:
        """Run a training job until it ends, as the SDK's method does, whose container class cannot be replaced.

        Raises:
            TopologyError: The groups are malformed.
            ChannelError: A channel is assigned to a group that does not exist.
            JobConfigError: A job with groups uses Pipe mode.
        """
        channels = request.get("InputDataConfig") or []
        algorithm = request["AlgorithmSpecification"]
        specs = requested_groups(request["ResourceConfig"])
        if "InstanceGroups" in request["ResourceConfig"]:
            check_no_pipe(algorithm, channels)
        container = _LocalContainers(
            specs,
            groups_by_channel(channels, specs),
            self._seed,
            image=algorithm["TrainingImage"],
            sagemaker_session=self.sagemaker_session,
            container_entrypoint=algorithm.get("ContainerEntrypoint"),
            container_arguments=algorithm.get("ContainerArguments"),
        )
        job = _LocalTrainingJob(container)
        job.start(
            channels,
            request["OutputDataConfig"],
            request.get("HyperParameters", {}),
            request.get("Environment") or {},
            request["TrainingJobName"],
        )
        # describe_training_job reads this; the Estimator learns from it where the model is.
        self._training_jobs[request["TrainingJobName"]] = job


class _LocalContainers(_SageMakerContainer):  # type: ignore[misc]  # the SDK has no types
    """All containers of one job."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        channel_groups: Mapping[str, frozenset[str]],
        seed: int | None,
        **settings: Any,
    ) -> None:
        super().__init__(specs[0].instance_type, sum(spec.num_hosts for spec in specs), **settings)
        # The seed is a text because the first draws of similar numbers are similar.
        draw = random.Random(None if seed is None else f"{seed} groups")  # noqa: S311 - no secret
        self._groups = deal_hosts(specs, self.hosts, draw)
        self._channel_groups = channel_groups

    def write_config_files(
        self, host: str, hyperparameters: Mapping[str, str], input_data_config: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the files of a host: only its own channels, and the groups as the service writes them."""
        own = [channel for channel in input_data_config if self._sees(host, channel["ChannelName"])]
        super().write_config_files(host, hyperparameters, own)
        path = self._folder(host) / "input" / "config" / "resourceconfig.json"
        written = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**written, **resource_config_of(self._groups, host)}), encoding="utf-8")

    def _create_docker_host(
        self, host: str, environment: Sequence[str], optml_subdirs: set[str], command: str, volumes: Sequence[Any]
    ) -> dict[str, Any]:
        model_dir = self._folder(host) / "model"
        model_dir.mkdir(exist_ok=True)
        own = [_Volume(str(model_dir), _MODEL_DIR)]
        for volume in volumes:
            channel = volume.container_dir.removeprefix(_CHANNELS_DIR)
            if channel in self._channel_groups and not self._sees(host, channel):
                # The SDK has created a mount point, which would look like an empty channel.
                (self._folder(host) / "input" / "data" / channel).rmdir()
            elif volume.container_dir != _MODEL_DIR:
                own.append(volume)
        # The SDK adds GPUs to a container if this is "local_gpu".
        self.instance_type = group_of(self._groups, host).instance_type
        described: dict[str, Any] = super()._create_docker_host(host, environment, optml_subdirs, command, own)
        return described

    def _folder(self, host: str) -> Path:
        return Path(self.container_root) / host

    def _sees(self, host: str, channel: str) -> bool:
        return group_of(self._groups, host).name in self._channel_groups[channel]
