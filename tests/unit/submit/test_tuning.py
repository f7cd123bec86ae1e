"""Tuning jobs: from ranges in the job file to the request and to the script's arguments."""

import re
from dataclasses import replace

import pytest

from lightning_sm.job.hyperparameters import encode, to_argv
from lightning_sm.submit.job_file import Range, Tune
from lightning_sm.submit.request_limits import request_problems
from lightning_sm.submit.training_job import script_options, training_job
from lightning_sm.submit.tuning import tuning_job, tuning_problems
from tests.unit.submit.test_preflight import JOB
from tests.unit.submit.test_request_limits import REQUEST

RANGES = {
    "model.learning_rate": Range(1e-4, 0.1, scale="log"),
    "model.width": Range(16, 128),
    "model.dropout": Range(0, 0.5),
    "optimizer": Range(values=["adam", "a b", 3, 0.5, None, [1, 2], "3"]),
}
TUNE = Tune("val_acc", RANGES, "maximize")


def request(tune=TUNE, **changed):
    """Return the request for a tuning job named digits, and the warnings."""
    return tuning_job(tune, "digits", {**REQUEST, **changed})


def problems(**changed):
    """Return the problems of a tuning job."""
    return list(tuning_problems(replace(JOB, tune=replace(TUNE, **changed))))


def test_the_request_fits_the_api_and_keeps_all_of_the_training_job():
    """The request keeps all settings that tuning jobs do not place elsewhere, and its name has the time."""
    arguments, warnings = request()
    assert request_problems(arguments, "CreateHyperParameterTuningJob") == []
    assert warnings == []
    assert re.fullmatch(r"digits-\d{6}-\d{6}", arguments["HyperParameterTuningJobName"])
    assert arguments["Tags"] == REQUEST["Tags"]
    definition = arguments["TrainingJobDefinition"]
    assert definition.pop("StaticHyperParameters") == REQUEST["HyperParameters"]
    assert definition == {
        name: value for name, value in REQUEST.items() if name not in {"TrainingJobName", "HyperParameters", "Tags"}
    }


def test_ranges_are_texts_of_their_kinds():
    """A range is an integer range only if both limits are integers; listed values are JSON."""
    ranges = request()[0]["HyperParameterTuningJobConfig"]["ParameterRanges"]
    assert ranges == {
        "ContinuousParameterRanges": [
            {"Name": "model.learning_rate", "MinValue": "0.0001", "MaxValue": "0.1", "ScalingType": "Logarithmic"},
            {"Name": "model.dropout", "MinValue": "0", "MaxValue": "0.5", "ScalingType": "Auto"},
        ],
        "IntegerParameterRanges": [{"Name": "model.width", "MinValue": "16", "MaxValue": "128", "ScalingType": "Auto"}],
        "CategoricalParameterRanges": [
            {"Name": "optimizer", "Values": ['"adam"', '"a b"', "3", "0.5", "null", "[1, 2]", '"3"']}
        ],
    }


def test_what_no_key_has_is_joined_with_the_rest():
    """Settings without a key, such as a seed, limits and earlier tuning jobs, are merged under their API names."""
    more = {
        "HyperParameterTuningJobConfig": {
            "StrategyConfig": {"HyperbandStrategyConfig": {"MinResource": 1, "MaxResource": 9}},
            "ResourceLimits": {"MaxRuntimeInSeconds": 3600},
            "RandomSeed": 7,
        },
        "WarmStartConfig": {
            "ParentHyperParameterTuningJobs": [{"HyperParameterTuningJobName": "first"}],
            "WarmStartType": "TransferLearning",
        },
    }
    tune = replace(TUNE, direction="minimize", strategy="hyperband", max_jobs=20, parallel_jobs=4, request=more)
    arguments, _ = request(tune)
    assert request_problems(arguments, "CreateHyperParameterTuningJob") == []
    config = {name: value for name, value in arguments["HyperParameterTuningJobConfig"].items() if "Ranges" not in name}
    assert config == {
        "Strategy": "Hyperband",
        "StrategyConfig": {"HyperbandStrategyConfig": {"MinResource": 1, "MaxResource": 9}},
        "HyperParameterTuningJobObjective": {"Type": "Minimize", "MetricName": "val_acc"},
        "ResourceLimits": {"MaxNumberOfTrainingJobs": 20, "MaxParallelTrainingJobs": 4, "MaxRuntimeInSeconds": 3600},
        "RandomSeed": 7,
    }
    assert arguments["WarmStartConfig"] == more["WarmStartConfig"]


def test_the_limits_of_a_tuning_job_are_those_of_the_service():
    """Problems name the key in the job file; tuning jobs accept fewer variables than training jobs."""
    variables = {f"K{index}": "1" for index in range(49)}
    tune = replace(TUNE, request={"WarmStartConfig": {}})
    arguments, _ = tuning_job(tune, "a" * 19, {**REQUEST, "Environment": variables})
    found = {problem.text for problem in request_problems(arguments, "CreateHyperParameterTuningJob")}
    assert "name: HyperParameterTuningJobName has 33 characters; the service allows 32." in found
    assert any(text.startswith("environment: ") and "allows 48" in text for text in found)
    assert "tune.request: WarmStartConfig lacks WarmStartType." in found


@pytest.mark.parametrize(("strategy", "expected"), [("random", {"MaxNumberOfTrainingJobs": 10}), ("grid", {})])
def test_the_number_of_jobs_has_a_default(strategy, expected):
    """For a grid, the service determines the number of jobs from the combinations."""
    limits = request(replace(TUNE, strategy=strategy))[0]["HyperParameterTuningJobConfig"]["ResourceLimits"]
    assert limits == {"MaxParallelTrainingJobs": 1, **expected}


def test_settings_that_training_jobs_of_a_tuning_job_cannot_have_are_left_out_with_a_warning():
    """Unsupported settings are dropped with a warning that has the API name, unless they match the default."""
    arguments, warnings = request(
        TensorBoardOutputConfig={"S3OutputPath": "s3://bucket/t"},
        RemoteDebugConfig={"EnableRemoteDebug": True},
        ProfilerConfig={"DisableProfiler": True},
        AlgorithmSpecification={**REQUEST["AlgorithmSpecification"], "ContainerEntrypoint": ["x"]},
    )
    assert request_problems(arguments, "CreateHyperParameterTuningJob") == []
    assert sorted(warning.split()[0] for warning in warnings) == [
        "ContainerEntrypoint",
        "RemoteDebugConfig",
        "TensorBoardOutputConfig",
    ]


def test_tuned_hyperparameters_arrive_with_their_types_whatever_the_fixed_ones_are(tmp_path):
    """The service's text works beside our JSON, and a tuned value overrides the config file and fixed values."""
    config = tmp_path / "config.yaml"
    config.write_text("optimizer: rmsprop\nmodel: {width: 1, name: a b}\n")
    job = replace(
        JOB, tune=TUNE, config=str(config), hyperparameters={"model.width": 3, "text": "a b", "nothing": None}
    )
    fixed = encode(script_options(job))
    assert fixed.keys() == {"model", "text", "nothing"}
    tuned = {"model.learning_rate": "0.0001", "model.width": "16", "model.dropout": "0", "optimizer": '"adam"'}
    written = {**fixed, **tuned, "_tuning_objective_metric": "val_acc"}
    assert to_argv(written) == [
        '--model={"width": 1, "name": "a b"}',
        "--model.dropout=0",
        "--model.learning_rate=0.0001",
        "--model.width=16",
        "--nothing=null",
        "--optimizer=adam",
        "--text=a b",
    ]


@pytest.mark.parametrize("metrics", [[], ["train_loss"], ["val_acc", "train_loss"]])
def test_the_objective_is_a_metric_of_the_job(metrics):
    """The objective's metric is defined even if the job file does not list it, and is read once per validation."""
    request = training_job(replace(JOB, metrics=metrics, tune=TUNE), "job-1", "s3://bucket")
    (definition,) = (one for one in request["AlgorithmSpecification"]["MetricDefinitions"] if one["Name"] == "val_acc")
    after = re.search(definition["Regex"], "epoch=3/10 step=45 validation=3 train_loss=0.4 val_acc=0.9333")
    assert after[1] == "0.9333"
    assert not re.search(definition["Regex"], "epoch=4/10 step=50 train_loss=0.3 val_acc=0.9333")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranges": {}}, ["tune.ranges is empty"]),
        ({"ranges": {"lr": Range(1, None)}}, ["tune.ranges.lr", "either min and max, or values"]),
        ({"ranges": {"lr": Range(1, 2, [1])}}, ["tune.ranges.lr", "either min and max, or values"]),
        ({"ranges": {"lr": Range()}}, ["tune.ranges.lr", "either min and max, or values"]),
        ({"ranges": {"lr": Range(2, 1)}}, ["min is 2 and max is 1"]),
        ({"ranges": {"lr": Range(values=[])}}, ["either min and max, or values"]),
        ({"ranges": {"lr": Range(0, 1, scale="log")}}, ["min is 0; with scale: log, expected more than 0"]),
        ({"ranges": {"lr": Range(0.5, 1, scale="reverse_log")}}, ["max is 1; with scale: reverse_log", "less than 1"]),
        ({"max_jobs": 5, "parallel_jobs": 6}, ["tune.parallel_jobs is 6", "only 5", "tune.max_jobs"]),
        ({"max_jobs": None, "parallel_jobs": 11}, ["only 10"]),
        ({"ranges": {"a b": Range(0, 1)}}, ["'a b'", "cannot be an option"]),
    ],
)
def test_every_contradiction_is_a_problem(changed, words):
    """Each contradiction is one problem that names the key and both values."""
    (problem,) = problems(**changed)
    for word in words:
        assert word in problem.text


def test_a_good_tuning_job_has_no_problems():
    """Numeric ranges and lists of values have no problems."""
    assert problems() == []
