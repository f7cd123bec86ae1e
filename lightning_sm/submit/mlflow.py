"""The MLflow server of a job: valid values in the job file, and what tells the script and the service."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_sm.submit.job_file import Job
from lightning_sm.submit.problems import JobProblem

# MLFlowLogger reads it where its tracking_uri is left out.
MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
# SageMaker's two kinds of managed MLflow: servers, and serverless apps.
_ARN = re.compile(
    r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:(mlflow-tracking-server/[A-Za-z0-9-]+|mlflow-app/[A-Za-z0-9-]+)"
)
_URI = re.compile(r"(https?|databricks|uc)://\S+|databricks(-uc)?")


def mlflow_config(job: Job) -> dict[str, str] | None:
    """Return the service's own settings for MLflow (``MlflowConfig``); None if the job file leaves them out."""
    names = {"MlflowExperimentName": job.mlflow_experiment, "MlflowRunName": job.mlflow_run}
    stated = {member: name for member, name in names.items() if name is not None}
    return {"MlflowResourceArn": job.mlflow or "", **stated} if stated else None


def mlflow_problems(job: Job) -> Iterator[JobProblem]:
    """Yield what is wrong with the job's ``mlflow``, ``mlflow_experiment`` and ``mlflow_run``."""
    for key in ("mlflow_experiment", "mlflow_run"):
        if getattr(job, key) is not None and not _ARN.fullmatch(job.mlflow or ""):
            yield JobProblem(
                key,
                f"{key} is set, but mlflow is {job.mlflow or 'missing'}; SageMaker records jobs in its own MLflow "
                "only. Set mlflow to the ARN of a tracking server or an app.",
                also=("mlflow",),
            )
    if job.mlflow is None:
        return
    if not (_ARN.fullmatch(job.mlflow) or _URI.fullmatch(job.mlflow)):
        yield JobProblem(
            "mlflow",
            f"mlflow is {job.mlflow!r}; expected https://..., or the ARN of a tracking server or an app, such as "
            "arn:aws:sagemaker:eu-west-1:111122223333:mlflow-tracking-server/NAME or .../mlflow-app/ID.",
        )
    stated = job.environment.get(MLFLOW_TRACKING_URI, job.mlflow)
    if stated != job.mlflow:
        yield JobProblem(
            "mlflow",
            f"mlflow is {job.mlflow}, but environment sets {MLFLOW_TRACKING_URI}={stated}. Remove one of them.",
            also=(f"environment.{MLFLOW_TRACKING_URI}",),
        )
    if job.network_isolation:
        yield JobProblem(
            "mlflow",
            "mlflow and network_isolation are both set, but hosts without a network do not reach MLflow. Remove one.",
            also=("network_isolation",),
        )
