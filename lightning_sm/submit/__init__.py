"""Submission of jobs: from one small YAML file to SageMaker's API, checked before anything is sent."""
