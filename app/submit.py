"""Submit jobs from Python: one training run on the digits for each learning rate.

python app/submit.py 1e-3 2e-3 5e-3
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from lightning_sm import submit_job

_LOG = logging.getLogger(__name__)
_JOB = Path(__file__).parent / "job.yaml"


def main(learning_rates: list[str]) -> None:
    """Submit a job for each learning rate, without waiting for it to end."""
    for learning_rate in learning_rates:
        job = submit_job(_JOB, {"hyperparameters.model.learning_rate": float(learning_rate)}, wait=False)
        _LOG.info("learning rate %s: %s", learning_rate, job["TrainingJobName"])


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    _LOG.setLevel(logging.INFO)
    main(sys.argv[1:])
