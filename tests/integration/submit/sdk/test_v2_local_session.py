"""Local mode with instance groups: from the Estimator's request to what Compose is given. Compose itself is a fake."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_sm.errors import ChannelError, JobConfigError, SDKError, TopologyError
from lightning_sm.job.emulated_service import GroupSpec, deal_hosts, resource_config_of
from lightning_sm.submit.sdk.v2_internals import Method, check_methods

pytestmark = [pytest.mark.sdk2, pytest.mark.filterwarnings("ignore")]  # the SDK's own warnings, at its import

ROOT = Path(__file__).parents[4]
ROLE = "arn:aws:iam::111111111111:role/unused"
GROUPS = [("data", "ml.c5.xlarge", 1), ("trainer", "ml.g5.xlarge", 2)]
# Keeps what it was given, which the SDK removes.
COMPOSE = '#!/bin/sh\ncp -R "$(dirname "$2")" "$GIVEN"\n'


class Given:
    """What Compose was given.

    Args:
        folder: Copy of the folder that the SDK made for the job.
    """

    def __init__(self, folder):
        self.folder = folder

    @property
    def services(self):
        """Host to its part of the Compose file, without the random suffix of the job in the host's name."""
        services = yaml.safe_load((self.folder / "docker-compose.yaml").read_text())["services"]
        return {short(host): service for host, service in sorted(services.items())}

    def mounts(self, host):
        """Path in the container to path on this machine."""
        return {volume.split(":")[1]: volume.split(":")[0] for volume in self.services[host]["volumes"]}

    def config(self, host, name):
        """Content of a file of a host, without the suffix."""
        (path,) = self.folder.glob(f"{host}-*/input/config/{name}.json")
        suffix = path.parents[2].name.removeprefix(host)
        return json.loads(path.read_text().replace(suffix, ""))

    def channel_folders(self, host):
        """Names of the folders that are there before anything is mounted."""
        (folder,) = self.folder.glob(f"{host}-*/input/data")
        return sorted(path.name for path in folder.iterdir())

    def hosts_of(self, group):
        """Hosts of an instance group."""
        groups = self.config("algo-1", "resourceconfig")["instance_groups"]
        return next(entry["hosts"] for entry in groups if entry["instance_group_name"] == group)


def short(host):
    """A host's name without the suffix of the job."""
    return host.rpartition("-")[0]


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory):
    """Commands that stand in for Docker's, and an SDK that looks for no account and reports to nobody."""
    pytest.importorskip("sagemaker.local", reason="needs sagemaker[local] 2 (extra launch)", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("machine")
    for name, script in (("docker", "#!/bin/sh\nexit 1\n"), ("docker-compose", COMPOSE)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    settings = folder / "sagemaker.yaml"
    settings.write_text('SchemaVersion: "1.0"\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(settings))
        yield


@pytest.fixture(scope="module")
def boto_session():
    """One for all tests: each reads the descriptions of the services again, for a second."""
    import boto3

    return boto3.Session(region_name="us-east-1")


@pytest.fixture(scope="module")
def session(boto_session):
    """A session whose assignment of hosts is always the same."""
    from lightning_sm.submit.sdk.v2_local_session import HeterogeneousLocalSession

    return HeterogeneousLocalSession(boto_session, seed=1)


def fit(folder, session, inputs=None, groups=None, **arguments):
    """Run a job to its end in an empty folder; return the Estimator and what Compose was given."""
    from sagemaker.estimator import Estimator
    from sagemaker.instance_group import InstanceGroup

    session.config = {"local": {"local_code": True, "container_root": str(folder)}}
    if groups:
        arguments["instance_groups"] = [InstanceGroup(*group) for group in groups]
    arguments = {"output_path": (folder / "output").as_uri(), **arguments}
    estimator = Estimator(image_uri="image", role=ROLE, sagemaker_session=session, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIVEN", str(folder / "given"))
        estimator.fit(inputs)
    return estimator, Given(folder / "given")


@pytest.fixture(scope="module")
def folder_of_data(tmp_path_factory):
    """Address of a folder."""
    return tmp_path_factory.mktemp("data").as_uri()


@pytest.fixture(scope="module")
def job(session, folder_of_data, tmp_path_factory):
    """A job with two groups, of which one sees a channel that the other does not: Estimator, and what Compose got."""
    from sagemaker.inputs import TrainingInput

    inputs = {"training": TrainingInput(folder_of_data, instance_groups=["data"]), "everywhere": folder_of_data}
    return fit(tmp_path_factory.mktemp("job"), session, inputs, GROUPS)


@pytest.fixture
def given(job):
    """What Compose was given for this job."""
    return job[1]


@pytest.fixture
def request_job(session, folder_of_data):
    """Ask the session for a job past the Estimator: ``request_job(channel={...}, groups=..., **fields)``."""
    from sagemaker.inputs import TrainingInput
    from sagemaker.instance_group import InstanceGroup

    def ask(channel=None, groups=GROUPS, input_mode="File", **fields):
        resources = {"InstanceGroups": [InstanceGroup(*group)._to_request_dict() for group in groups or ()]}
        session.sagemaker_client.create_training_job(
            TrainingJobName="job",
            AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": input_mode},
            OutputDataConfig={"S3OutputPath": ""},
            ResourceConfig=resources if groups is not None else {"InstanceType": "local", "InstanceCount": 1},
            InputDataConfig=[{"ChannelName": "training", **TrainingInput(folder_of_data, **(channel or {})).config}],
            **fields,
        )

    return ask


def test_hosts_are_told_their_groups_as_by_the_service(given):
    """Every host has the service's keys: all hosts sorted, all groups, its own group and type, the interface."""
    for host in ("algo-1", "algo-2", "algo-3"):
        found = given.config(host, "resourceconfig")
        name, instance_type = next(group[:2] for group in GROUPS if host in given.hosts_of(group[0]))
        assert found == {
            "current_group_name": name,
            "current_host": host,
            "current_instance_type": instance_type,
            "hosts": ["algo-1", "algo-2", "algo-3"],
            "instance_groups": [
                {"instance_group_name": group, "instance_type": kind, "hosts": given.hosts_of(group)}
                for group, kind, _ in GROUPS
            ],
            "network_interface_name": "eth0",
        }
    assert [len(given.hosts_of(group)) for group, _, _ in GROUPS] == [1, 2]


def test_the_estimator_learns_where_the_model_is(job):
    """A job that has ended is known to the session, as after any local job."""
    estimator, given = job
    assert estimator.model_data == (given.folder.parent / "output" / "model.tar.gz").as_uri()


def test_a_seed_repeats_the_assignment_and_others_differ():
    """The same seed deals the same hosts to the same groups; over some seeds each host lands in each group."""
    specs, hosts = [GroupSpec(name, count, kind) for name, kind, count in GROUPS], ["algo-1", "algo-2", "algo-3"]
    dealt = [deal_hosts(specs, hosts, random.Random(str(seed))) for seed in range(30)]
    assert dealt == [deal_hosts(specs, hosts, random.Random(str(seed))) for seed in range(30)]
    assert {groups[0].hosts for groups in dealt} == {(host,) for host in hosts}
    assert any(groups[1].hosts != tuple(sorted(groups[1].hosts)) for groups in dealt)


def test_many_hosts_are_sorted_as_text():
    """algo-10 comes before algo-2, as on the service."""
    hosts = [f"algo-{number}" for number in range(1, 12)]
    found = resource_config_of(deal_hosts([GroupSpec("trainer", 11)], hosts, random.Random(1)), "algo-2")
    assert found["hosts"][:4] == ["algo-1", "algo-10", "algo-11", "algo-2"]


def test_a_channel_is_only_where_its_groups_are(given):
    """Hosts of other groups have neither its folder nor its mount nor its entry."""
    for host in ("algo-1", "algo-2", "algo-3"):
        expected = ["everywhere", "training"] if host in given.hosts_of("data") else ["everywhere"]
        mounted = [path for path in given.mounts(host) if path.startswith("/opt/ml/input/data/")]
        assert sorted(given.config(host, "inputdataconfig")) == expected
        assert sorted(Path(path).name for path in mounted) == expected
        assert given.channel_folders(host) == expected


def test_each_host_has_a_model_folder_of_its_own(given):
    """No two containers share /opt/ml/model."""
    assert len({given.mounts(host)["/opt/ml/model"] for host in given.services}) == 3


def test_a_plain_job_is_that_of_the_sdk(session, boto_session, folder_of_data, tmp_path):
    """Without groups everything is as with LocalSession, but for the service's single group and the model folders."""
    from sagemaker.local import LocalSession

    jobs = []
    for name, either in (("own", session), ("sdk", LocalSession(boto_session))):
        (tmp_path / name).mkdir()
        settings = {"instance_type": "local", "instance_count": 2, "hyperparameters": {"rate": 0.1}}
        jobs.append(fit(tmp_path / name, either, {"training": folder_of_data}, **settings)[1])
    own, expected = ([summary(given, host) for host in ("algo-1", "algo-2")] for given in jobs)
    assert own == expected
    (group,) = jobs[0].config("algo-1", "resourceconfig")["instance_groups"]
    assert (group["instance_group_name"], group["instance_type"]) == ("homogeneousCluster", "local")
    assert sorted(group["hosts"]) == ["algo-1", "algo-2"]


def summary(given, host):
    """What is the same in two jobs."""
    ours = {"current_group_name", "instance_groups"}
    resources = {name: value for name, value in given.config(host, "resourceconfig").items() if name not in ours}
    service = given.services[host]
    names = [variable.partition("=")[0] for variable in service["environment"]]
    unlike = {"container_name", "environment", "networks", "volumes"}
    rest = {name: value for name, value in service.items() if name not in unlike}
    mounts = sorted(given.mounts(host))
    files = [given.config(host, name) for name in ("hyperparameters", "inputdataconfig")]
    return resources, names, rest, mounts, files, given.channel_folders(host)


def test_gpus_go_to_the_groups_that_ask_for_them(session, tmp_path):
    """Containers of the type local_gpu get all GPUs; those of an ml. type, which is a label, get none."""
    _, given = fit(tmp_path, session, groups=[("data", "ml.g5.xlarge", 1), ("trainer", "local_gpu", 1)])
    assert [host for host, service in given.services.items() if "deploy" in service] == given.hosts_of("trainer")


def test_an_entry_point_and_its_arguments_are_kept(session, tmp_path):
    """``container_entry_point`` and ``container_arguments`` reach every container."""
    command = {"container_entry_point": ["python3"], "container_arguments": ["-V"]}
    _, given = fit(tmp_path, session, groups=GROUPS, **command)
    assert [service["entrypoint"] for service in given.services.values()] == 3 * [["python3", "-V"]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "instance_groups is empty"),
        ([("data", "ml.c5.xlarge", 0)], "'data' has 0 hosts; a group needs at least 1"),
        ([("data", "ml.c5.xlarge", None)], "'data' has None hosts"),
        ([("a", "ml.c5.xlarge", 1), ("a", "ml.g5.xlarge", 1)], "'a' is named twice"),
        ([(None, "ml.c5.xlarge", 1)], r"InstanceGroup\(None, 'ml.c5.xlarge', 1\): a group needs a name"),
    ],
)
def test_malformed_groups_are_refused(request_job, groups, message):
    """Groups without hosts, without a name or with the same name are errors that say so."""
    with pytest.raises(TopologyError, match=message):
        request_job(groups=groups)


@pytest.mark.parametrize(("groups", "known"), [(GROUPS, "'data', 'trainer'"), (None, "'homogeneousCluster'")])
def test_a_channel_for_an_unknown_group_is_refused(request_job, groups, known):
    """The error names the channel, the group that it asks for, and those that there are."""
    with pytest.raises(ChannelError, match=rf"'training' .* \['dtaa'\] .* the groups \[{known}\]"):
        request_job({"instance_groups": ["dtaa"]}, groups)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_mode": "Pipe"}, "Pipe mode .* is not supported in local mode"),
        ({"channel": {"input_mode": "Pipe"}}, "'training' has input_mode='Pipe'"),
    ],
)
def test_what_local_mode_cannot_do_is_refused(request_job, fields, message):
    """What the SDK would ignore in silence, or refuse late, is an error that names it."""
    with pytest.raises(JobConfigError, match=message):
        request_job(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_spot_instances": True, "max_wait": 90000}, "Spot training is not supported in local mode"),
        ({"checkpoint_s3_uri": "s3://bucket/checkpoints"}, "checkpoint_s3_uri is not supported in local mode"),
        ({"instance_type": "local", "instance_count": 1}, "cannot be set when instance_groups is set"),
    ],
)
def test_the_estimator_refuses_what_it_refuses_in_any_local_job(session, tmp_path, arguments, message):
    """Spot, checkpoints, and a type beside groups are errors of the SDK with groups as without."""
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, session, groups=GROUPS, **arguments)
    assert not (tmp_path / "given").exists()


def test_a_changed_sdk_is_noticed_before_a_job_starts(monkeypatch):
    """The error names the method of the SDK that is gone, the version that is installed, and those that were tested."""
    from sagemaker.local.image import _SageMakerContainer

    from lightning_sm.submit.sdk.v2_local_session import HeterogeneousLocalSession

    monkeypatch.delattr(_SageMakerContainer, "write_config_files")
    with pytest.raises(SDKError, match=r"\(sagemaker 2\.[\d.]+\).* 2\.257\.1 to .*write_config_files is missing"):
        HeterogeneousLocalSession()


def test_changed_parameters_are_named():
    """A method with other parameters is refused with both lists."""
    with pytest.raises(SDKError, match=r"Given\.mounts takes \(self, host\), not \(self, name\)"):
        check_methods([Method(Given, "mounts", "self, name")])


def import_without_packages(*folders):
    """The last line that an import of the module prints where only the packages in some folders are installed."""
    module = "lightning_sm.submit.sdk.v2_local_session"
    code = f"import sys; sys.path[:0] = {[str(ROOT), *map(str, folders)]!r}; import {module}"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    return done.stderr.strip().splitlines()[-1]


def test_a_missing_sdk_is_named():
    """Without an SDK, the import fails with what to install."""
    message = import_without_packages()
    assert message.startswith("lightning_sm.errors.SDKError: Local mode with instance groups needs version 2")
    assert "no version is installed" in message
    assert "pip install 'sagemaker[local]>=" in message


def test_version_3_is_named(tmp_path):
    """With version 3, the import fails and says that this version has no such local mode."""
    folder = tmp_path / "sagemaker_train-1.27.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sagemaker-train\nVersion: 1.27.0\n")
    message = import_without_packages(tmp_path)
    assert "sagemaker-train 1.27.0 is installed, which belongs to version 3" in message
    assert "has no instance groups" in message


def test_the_package_comes_without_the_sdk():
    """Importing lightning_sm loads no SDK."""
    code = "import sys, lightning_sm; sys.exit('sagemaker' in sys.modules or 'boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
