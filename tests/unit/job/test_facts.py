"""Reading the facts of a job from every available source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_sm.job.facts import Channel, InstanceGroup, SageMakerJob
from tests.fakes.job_folder import (
    SDK_V2_LOCAL,
    SDK_V3_LOCAL,
    SERVICE,
    TWO_GROUPS,
    TYPES,
    read,
    resource_config,
    write_job,
)

# ---- sources and their order


def test_no_source_means_off_sagemaker(tmp_path):
    """Without the file and the variables, there is no job and no error."""
    assert SageMakerJob.from_environment({}, tmp_path) is None
    assert SageMakerJob.from_environment({"SM_HOSTS": "", "SM_RESOURCE_CONFIG": ""}, tmp_path) is None


def test_off_sagemaker_other_files_and_settings_do_not_matter(tmp_path):
    """Hyperparameters or settings alone, without hosts, do not make a job."""
    write_job(tmp_path, hyperparameters={"a": "1"}, channels={"train": {}})
    assert SageMakerJob.from_environment({"LIGHTNING_SM_DEVICES": "2"}, tmp_path) is None


def test_sources_are_tried_from_file_to_variables(tmp_path):
    """The file, always written for this host, wins over SM_RESOURCE_CONFIG, which wins over SM_HOSTS."""
    variables = {"SM_HOSTS": '["third"]', "SM_CURRENT_HOST": "third"}
    assert read(tmp_path, **variables).current_host == "third"
    variables["SM_RESOURCE_CONFIG"] = json.dumps(resource_config({"g": ["second"]}, "second"))
    assert read(tmp_path, **variables).current_host == "second"
    write_job(tmp_path, resource_config({"g": ["first"]}, "first"))
    assert read(tmp_path, **variables).current_host == "first"


def test_source_names_where_the_hosts_came_from(tmp_path):
    """The job records which file or variable its hosts came from, so that errors can name it."""
    from_variables = read(tmp_path, SM_HOSTS='["a"]', SM_CURRENT_HOST="a")
    assert (from_variables.source, from_variables.has_own_file) == ("SM_HOSTS/SM_CURRENT_HOST", False)
    assert read(tmp_path, SM_RESOURCE_CONFIG=SDK_V3_LOCAL).source == "SM_RESOURCE_CONFIG"
    write_job(tmp_path, SDK_V3_LOCAL)
    from_file = read(tmp_path)
    assert (from_file.source, from_file.has_own_file) == (str(tmp_path / "input/config/resourceconfig.json"), True)


def test_base_dir_comes_from_the_argument_then_the_variable(tmp_path):
    """SAGEMAKER_BASE_DIR replaces /opt/ml; an explicit folder wins over it."""
    one = write_job(tmp_path / "one", resource_config({"g": ["one"]}, "one"))
    two = write_job(tmp_path / "two", resource_config({"g": ["two"]}, "two"))
    env = {"SAGEMAKER_BASE_DIR": str(one)}
    by_variable = SageMakerJob.from_environment(env)
    by_argument = SageMakerJob.from_environment(env, str(two))
    assert by_variable is not None
    assert by_argument is not None
    assert (by_variable.current_host, by_variable.base_dir) == ("one", one)
    assert (by_argument.current_host, by_argument.base_dir) == ("two", two)


def test_folders_follow_the_base_dir(tmp_path):
    """All folders are below the base folder, and each host has a separate output folder."""
    job = read(write_job(tmp_path, SERVICE))
    assert job.model_dir == tmp_path / "model"
    assert job.output_dir == tmp_path / "output"
    assert job.host_output_dir == tmp_path / "output" / "data" / "algo-1"
    assert job.code_dir == tmp_path / "code"


# ---- hosts and groups


def test_service_file_of_a_homogeneous_job(tmp_path):
    """A job with one group is not heterogeneous, and the group's hosts stay in the file's order."""
    job = read(write_job(tmp_path, SERVICE))
    assert job.hosts == ("algo-1", "algo-2", "algo-3", "algo-4")
    assert job.groups == (
        InstanceGroup("homogeneousCluster", ("algo-3", "algo-1", "algo-4", "algo-2"), "ml.g4dn.xlarge"),
    )
    assert not job.is_heterogeneous
    assert job.network_interface == "eth0"


def test_more_than_one_group_is_a_heterogeneous_job(tmp_path):
    """Groups keep the order of the file, and the current group is the one that contains this host."""
    job = read(write_job(tmp_path, resource_config(TWO_GROUPS, "algo-3", instance_types=TYPES)))
    assert job.is_heterogeneous
    assert [group.name for group in job.groups] == ["data_group", "gpu_group"]
    assert job.current_group == InstanceGroup("data_group", ("algo-3",), "ml.c5.xlarge")


@pytest.mark.parametrize("groups", [None, []])
def test_missing_and_empty_groups_are_one_group_of_all_hosts(tmp_path, groups):
    """Without groups, as in local mode or as an empty list from the toolkit, all hosts form one group."""
    resources = {"current_host": "a", "hosts": ["b", "a"], "instance_groups": groups, "current_instance_type": "local"}
    job = read(write_job(tmp_path, resources))
    assert job.groups == (InstanceGroup("homogeneousCluster", ("b", "a"), "local"),)


def test_sdk_v2_local_mode_verbatim(tmp_path):
    """SDK v2's local mode is read: its host names have a suffix, and there are no groups."""
    job = read(write_job(tmp_path, SDK_V2_LOCAL, channels={"train": {"TrainingInputMode": "File"}}))
    assert (job.current_host, job.hosts) == ("algo-2-d0zia", ("algo-1-d0zia", "algo-2-d0zia"))
    assert job.groups == (InstanceGroup("homogeneousCluster", job.hosts, "local"),)
    assert job.channels == {"train": Channel("train", tmp_path / "input/data/train")}


def test_sdk_v3_local_mode_verbatim(tmp_path):
    """SDK v3's local mode is read: the interface is reported as written, although no container has it."""
    job = read(write_job(tmp_path, SDK_V3_LOCAL))
    assert job.network_interface == "ethwe"
    assert job.current_group.instance_type == "local_cpu"


def test_toolkit_variables_carry_groups(tmp_path):
    """Without a file, the groups come from SM_INSTANCE_GROUPS_DICT."""
    entries = resource_config(TWO_GROUPS, "algo-1", instance_types=TYPES)["instance_groups"]
    job = read(
        tmp_path,
        SM_HOSTS='["algo-1", "algo-2", "algo-3"]',
        SM_CURRENT_HOST="algo-1",
        SM_NETWORK_INTERFACE_NAME="eth1",
        SM_INSTANCE_GROUPS_DICT=json.dumps({entry["instance_group_name"]: entry for entry in entries}),
    )
    assert job.current_group == InstanceGroup("gpu_group", ("algo-2", "algo-1"), "ml.g5.xlarge")
    assert job.network_interface == "eth1"


# ---- other files


def test_without_checkpoint_configuration_there_is_no_checkpoint_folder(tmp_path):
    """An existing folder is not used for checkpoints unless the configuration file declares it as synchronised."""
    (tmp_path / "checkpoints").mkdir()
    job = read(write_job(tmp_path, SERVICE))
    assert (job.checkpoint_dir, job.checkpoint_uri, job.tensorboard_dir) == (None, None, None)


@pytest.mark.parametrize(("name", "folder"), [("tune-1-003", "checkpoints/tune-1-003"), (None, "checkpoints")])
def test_training_jobs_of_a_tuning_job_have_checkpoint_folders_of_their_own(tmp_path, name, folder):
    """Training jobs of one tuning job share an S3 address and would resume from each other in a common folder."""
    hyperparameters = {"_tuning_objective_metric": "val_acc", "lr": "0.1"}
    base = write_job(tmp_path, SERVICE, checkpoint={"S3Uri": "s3://b/c"}, hyperparameters=hyperparameters)
    variables = {} if name is None else {"TRAINING_JOB_NAME": name}
    assert read(base, **variables).checkpoint_dir == tmp_path / folder


@pytest.mark.parametrize(
    ("checkpoint", "directory", "uri"),
    [
        ({"LocalPath": "/elsewhere", "S3Uri": "s3://bucket/ckpt"}, "/elsewhere", "s3://bucket/ckpt"),
        ({"S3Uri": "s3://bucket/ckpt"}, None, "s3://bucket/ckpt"),
        ({"LocalPath": "", "S3Uri": None}, None, None),
    ],
)
def test_checkpoint_configuration_gives_folder_and_address(tmp_path, checkpoint, directory, uri):
    """The configured folder is used; the default is SageMaker's, below the base folder."""
    job = read(write_job(tmp_path, SERVICE, checkpoint=checkpoint))
    assert job.checkpoint_dir == (Path(directory) if directory else tmp_path / "checkpoints")
    assert job.checkpoint_uri == uri


@pytest.mark.parametrize(
    ("checkpoint", "has_agent"),
    [
        ({"S3Uri": "s3://bucket/ckpt"}, True),
        ({"LocalPath": "/jobs/j/algo-1/checkpoints", "S3Uri": "file:///jobs/j/checkpoints"}, True),
        ({"LocalPath": "/opt/ml/checkpoints"}, False),
        (None, False),
    ],
)
def test_checkpoints_with_an_address_are_uploaded(tmp_path, checkpoint, has_agent):
    """The emulator's agent also uploads checkpoints, though its address is not in S3."""
    assert read(write_job(tmp_path, SERVICE, checkpoint=checkpoint)).has_upload_agent is has_agent


@pytest.mark.parametrize(("stated", "directory"), [({"LocalPath": "/tb"}, "/tb"), ({"S3OutputPath": "s3://b"}, None)])
def test_tensorboard_configuration_gives_folder(tmp_path, stated, directory):
    """The configured folder is used; the default is SageMaker's, below the base folder."""
    job = read(write_job(tmp_path, SERVICE, tensorboard=stated))
    assert job.tensorboard_dir == (Path(directory) if directory else tmp_path / "output" / "tensorboard")


def test_channels_carry_mode_and_distribution(tmp_path):
    """Missing settings have the API's defaults; settings that this package does not use are ignored."""
    channels = {
        "train": {"TrainingInputMode": "Pipe", "S3DistributionType": "ShardedByS3Key", "RecordWrapperType": "None"},
        "val": {},
    }
    job = read(write_job(tmp_path, SERVICE, channels=channels))
    assert job.channels == {
        "train": Channel("train", tmp_path / "input/data/train", "Pipe", "ShardedByS3Key"),
        "val": Channel("val", tmp_path / "input/data/val", "File", "FullyReplicated"),
    }


def test_channels_come_from_the_variable_without_a_file(tmp_path):
    """SM_INPUT_DATA_CONFIG is used only if the file is missing."""
    variables = {"SM_INPUT_DATA_CONFIG": '{"by_variable": {}}'}
    write_job(tmp_path, SERVICE)
    assert list(read(tmp_path, **variables).channels) == ["by_variable"]
    write_job(tmp_path, channels={"by_file": {}})
    assert list(read(tmp_path, **variables).channels) == ["by_file"]


def test_channels_that_sdk_v3_adds_for_itself_are_hidden(tmp_path):
    """The channels for SDK v3's drivers and the user's code are not data."""
    job = read(write_job(tmp_path, SERVICE, channels={"sm_drivers": {}, "code": {}, "train": {}}))
    assert list(job.channels) == ["train"]


@pytest.mark.parametrize(
    ("directory", "names"),
    [
        (None, ["code", "train"]),
        ("s3://bucket/sourcedir.tar.gz", ["code", "train"]),
        ("/opt/ml/input/data/codes", ["code", "train"]),
        ("/opt/ml/input/data/code", ["train"]),
        ("/opt/ml/input/data/code/sourcedir.tar.gz", ["train"]),
    ],
)
def test_a_channel_named_code_is_data_unless_the_script_is_in_it(tmp_path, directory, names):
    """The drivers (SDK v3) or the code's path (SDK v2, ``lightning-sm submit``) show that the channel holds code."""
    hyperparameters = {} if directory is None else {"sagemaker_submit_directory": f'"{directory}"'}
    job = read(write_job(tmp_path, SERVICE, channels={"code": {}, "train": {}}, hyperparameters=hyperparameters))
    assert list(job.channels) == names


def test_hyperparameters_keep_their_text(tmp_path):
    """Strings stay undecoded; values that a container wrote as plain JSON become text."""
    values = {"a": '"quoted"', "b": "None", "c": 3, "d": {"e": None}, "f": True}
    job = read(write_job(tmp_path, SERVICE, hyperparameters=values))
    assert job.hyperparameters == {"a": '"quoted"', "b": "None", "c": "3", "d": '{"e": null}', "f": "true"}


def test_hyperparameters_come_from_the_variable_without_a_file(tmp_path):
    """The values of SM_HPS are encoded as JSON again, because the toolkit decoded them."""
    write_job(tmp_path, SERVICE)
    assert read(tmp_path, SM_HPS='{"a": "a b", "n": null}').hyperparameters == {"a": '"a b"', "n": "null"}
    write_job(tmp_path, hyperparameters={})
    assert read(tmp_path, SM_HPS='{"a": "a b"}').hyperparameters == {}


# ---- settings


def test_settings_default_to_unset(tmp_path):
    """Settings without a LIGHTNING_SM_* variable are unset, so that the rules decide."""
    job = read(write_job(tmp_path, SERVICE))
    assert (job.addresses, job.data_groups, job.main_port, job.devices, job.name) == ({}, None, None, None, None)
    assert job.num_gpus >= 0


def test_settings_are_read_from_variables(tmp_path):
    """Each LIGHTNING_SM_* variable sets one fact of the job."""
    job = read(
        write_job(tmp_path, SERVICE),
        LIGHTNING_SM_HOST_ADDRESSES='{"algo-1": "10.0.0.1"}',
        LIGHTNING_SM_DATA_GROUPS=" a , b,,",
        LIGHTNING_SM_MAIN_PORT="23456",
        LIGHTNING_SM_DEVICES="4",
        SM_NUM_GPUS="8",
        TRAINING_JOB_NAME="job-1",
        SAGEMAKER_JOB_NAME="job-2",
    )
    assert job.addresses == {"algo-1": "10.0.0.1"}
    assert job.data_groups == ("a", "b")
    assert (job.main_port, job.devices, job.num_gpus, job.name) == (23456, 4, 8, "job-1")


@pytest.mark.parametrize(
    ("addresses", "is_shared"),
    [({}, False), ({"algo-1": "10.0.0.1"}, False), ({"algo-1": "127.0.0.2"}, True), ({"algo-2": "127.0.0.3"}, False)],
)
def test_hosts_share_a_machine_if_the_address_of_this_one_is_local(addresses, is_shared):
    """A local address of this host implies a shared machine, since other hosts could not reach it otherwise."""
    assert SageMakerJob("algo-1", ("algo-1", "algo-2"), (), "test", addresses=addresses).shares_machine == is_shared


def test_the_name_comes_from_the_toolkit_where_the_service_does_not_tell(tmp_path):
    """A rank that the toolkit's mpirun started on another host reads the job's name from the toolkit's variables."""
    write_job(tmp_path, SERVICE)
    assert read(tmp_path, SM_TRAINING_ENV='{"job_name": "job-1"}').name == "job-1"
    assert read(tmp_path, SM_TRAINING_ENV='{"job_name": null}').name is None
    assert read(tmp_path, SM_TRAINING_ENV='{"job_name": "job-1"}', TRAINING_JOB_NAME="job-2").name == "job-2"


def test_empty_data_groups_mean_none_and_not_unset(tmp_path):
    """An empty LIGHTNING_SM_DATA_GROUPS disables the rules that choose data groups."""
    assert read(write_job(tmp_path, SERVICE), LIGHTNING_SM_DATA_GROUPS="").data_groups == ()
