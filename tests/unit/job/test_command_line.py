"""Building script arguments from hyperparameters and the config channel, and recognising the toolkit's arguments."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.job.command_line import is_toolkit_rendering, job_arguments
from lightning_sm.job.facts import Channel
from tests.fakes.job_folder import make_job

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def job_with(hyperparameters=None, config_dir=None):
    """Return a job with one host."""
    channels = {} if config_dir is None else {"config": Channel("config", config_dir)}
    return make_job({"trainer": ["algo-1"]}, hyperparameters=hyperparameters or {}, channels=channels)


@pytest.fixture
def config_dir(tmp_path):
    """Create a config channel with two YAML files, a JSON file, a README and a subfolder."""
    folder = tmp_path / "input" / "data" / "config"
    (folder / "old.yaml").mkdir(parents=True)
    for name in ("b.yml", "a.yaml", "c.json", "README.md"):
        (folder / name).write_text("{}")
    return folder


def test_hyperparameters_become_options(tmp_path):
    """Without a config channel, the options are the hyperparameters, except those for the toolkit."""
    job = job_with({"subcommand": "validate", "trainer.max_epochs": "2", "sagemaker_program": "train.py"})
    assert job_arguments(job, tmp_path) == ["validate", "--trainer.max_epochs=2"]


def test_files_of_the_config_channel_come_first_and_sorted(config_dir, tmp_path):
    """Each YAML or JSON file becomes a --config option. Hyperparameters follow and override it."""
    arguments = job_arguments(job_with({"a": "1"}, config_dir), tmp_path)
    assert arguments == [*(f"--config={config_dir / name}" for name in ("a.yaml", "b.yml", "c.json")), "--a=1"]


@pytest.mark.parametrize("stated", ["b.yml", '"b.yml"'])
def test_a_config_hyperparameter_chooses_one_file_of_the_channel(config_dir, tmp_path, stated):
    """A config hyperparameter that names a file in the channel, quoted or not, selects that file alone."""
    assert job_arguments(job_with({"config": stated}, config_dir), tmp_path) == [f"--config={config_dir / 'b.yml'}"]


def test_a_config_file_of_the_code_comes_before_one_of_the_channel(config_dir, tmp_path):
    """A config path in the working directory wins over the channel's file of that name, and follows all its files."""
    (tmp_path / "b.yml").write_text("{}")
    arguments = job_arguments(job_with({"config": "b.yml"}, config_dir), tmp_path)
    assert arguments[-1] == "--config=b.yml"
    assert len(arguments) == 4


@pytest.mark.parametrize("text", ["trainer: {max_epochs: 1}", "trainer: {max_epochs: 1}" + " " * 2000])
def test_an_inline_config_passes_unchanged(config_dir, tmp_path, text):
    """A config hyperparameter that is not a path, however long, is passed on after the channel's files."""
    assert job_arguments(job_with({"config": text}, config_dir), tmp_path)[-1] == f"--config={text}"


def test_a_config_channel_without_a_folder_has_no_files(tmp_path):
    """A channel in Pipe mode has no folder and adds no options."""
    assert job_arguments(job_with({}, tmp_path / "missing"), tmp_path) == []


# How sagemaker-training 5.1 renders these values (mapping.to_cmd_args).
HYPERPARAMETERS = {
    "k": "true",
    "none": "null",
    "nested": '{"x": 1, "y": [1, 2]}',
    "b": "4",
    "sagemaker_program": '"train.py"',
    "_tuning_objective_metric": '"val_acc"',
}
RENDERED = ["-b", "4", "--k", "True", "--nested", "x=1,y=[1, 2]", "--none", ""]


def test_the_toolkits_command_line_is_recognised():
    """The toolkit writes one name and one value for each hyperparameter that is not for the toolkit."""
    assert is_toolkit_rendering(RENDERED, job_with(HYPERPARAMETERS))


def test_the_sdk_v3_drivers_command_line_is_recognised():
    """SDK v3 also passes on the hyperparameters for the toolkit."""
    arguments = [*RENDERED, "--sagemaker_program", "train.py", "--_tuning_objective_metric", "val_acc"]
    assert is_toolkit_rendering(arguments, job_with(HYPERPARAMETERS))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fit"],
        ["fit", *RENDERED],
        RENDERED[:-2],
        RENDERED[:-1],
        [*RENDERED, "--own", "1"],
        [*RENDERED, "--flag"],
        ["-b=4", "--k=True"],
        ["b", "4", "k", "True", "nested", "x", "none", ""],
    ],
)
def test_a_command_line_of_the_users_own_is_not_taken_for_the_toolkits(arguments):
    """A subcommand, a missing or additional option, or another notation shows that the user wrote the arguments."""
    assert not is_toolkit_rendering(arguments, job_with(HYPERPARAMETERS))


def test_a_value_of_the_scripts_own_wins_and_is_named(caplog):
    """If the user's arguments override a hyperparameter, the log names the option and both values."""
    job = job_with({"data.batch_size": "32", "model.lr": "0.1"})
    assert not is_toolkit_rendering(["--data.batch_size", "64", "--model.lr", "0.1"], job)
    (line,) = caplog.messages
    assert "--data.batch_size 64 (hyperparameter: 32)" in line
    assert "model.lr" not in line


@pytest.mark.toolkit
@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), VALUES, min_size=1, max_size=4))
def test_whatever_the_programs_write_is_recognised(values):
    """Values of any type from any SDK are recognised, even after a shell has removed their quotes."""
    mapping = pytest.importorskip("sagemaker_training.mapping", reason="needs sagemaker-training")

    for hyperparameters in (
        {key: str(value) for key, value in values.items()},  # SDK v2, generic Estimator
        {key: json.dumps(value) for key, value in values.items()},  # SDK v2, framework
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()},  # SDK v3
    ):
        decoded = {key: decoded_as_programs_do(value) for key, value in hyperparameters.items()}
        by_toolkit = mapping.to_cmd_args(decoded)
        by_driver = [
            part
            for key, value in decoded.items()
            for part in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
        ]
        for arguments in (by_toolkit, by_driver, [part.replace("'", "") for part in by_driver]):
            assert is_toolkit_rendering(arguments, job_with(hyperparameters))


def decoded_as_programs_do(text):
    """Parse JSON if the text is valid JSON, as the toolkit and the SDK v3 driver do."""
    try:
        return json.loads(text)
    except ValueError:
        return text
