"""Submission of jobs: from one small YAML file to the SageMaker SDK, checked before anything is sent."""
