"""Submit jobs from Python: one training on the digits for each learning rate.

python app/submit.py 1e-3 2e-3 5e-3
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from lightning_sm.submit.job_file import read_job
from lightning_sm.submit.submit import send

_LOG = logging.getLogger(__name__)
_JOB = Path(__file__).parent / "job.yaml"


def main(learning_rates: list[str]) -> None:
    """Submit a job for each learning rate, without waiting until it ends."""
    for learning_rate in learning_rates:
        job = read_job(_JOB, [f"--hyperparameters.model.learning_rate={learning_rate}"])
        description = send(job, wait=False)
        _LOG.info("learning rate %s: %s", learning_rate, description["TrainingJobName"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(sys.argv[1:])
