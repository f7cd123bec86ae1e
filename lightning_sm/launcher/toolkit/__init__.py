"""The interface of sagemaker-training for scripts: environment variables, and the SDK's ``distribution``."""
