"""The interface of sagemaker-training to scripts: its variables, and the SDK's ``distribution``."""
