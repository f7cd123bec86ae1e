"""The interface that sagemaker-training offers to scripts: environment variables, and the SDK's ``distribution``."""
