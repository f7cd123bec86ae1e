"""Public scripts, off SageMaker and in emulated jobs."""
