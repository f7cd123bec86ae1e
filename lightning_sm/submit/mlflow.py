"""The MLflow server of a job: valid values in the job file, and the variable that tells the script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_sm.submit.job_file import Job

# MLFlowLogger reads it where its tracking_uri is left out.
MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
# SageMaker's two kinds of managed MLflow: servers, and serverless apps.
_ARN = re.compile(
    r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:(mlflow-tracking-server/[A-Za-z0-9-]+|mlflow-app/[A-Za-z0-9-]+)"
)
_URI = re.compile(r"(https?|databricks|uc)://\S+|databricks(-uc)?")


def mlflow_problems(job: Job) -> Iterator[str]:
    """Yield what is wrong with the job's ``mlflow``."""
    if job.mlflow is None:
        return
    if not (_ARN.fullmatch(job.mlflow) or _URI.fullmatch(job.mlflow)):
        yield (
            f"mlflow is {job.mlflow!r}; expected https://..., or the ARN of a tracking server or an app, such as "
            "arn:aws:sagemaker:eu-west-1:111122223333:mlflow-tracking-server/NAME or .../mlflow-app/ID."
        )
    stated = job.environment.get(MLFLOW_TRACKING_URI, job.mlflow)
    if stated != job.mlflow:
        yield f"mlflow is {job.mlflow}, but environment sets {MLFLOW_TRACKING_URI}={stated}. Remove one of them."
    if job.network_isolation:
        yield "mlflow and network_isolation are both set, but hosts without a network do not reach MLflow. Remove one."
