"""What sagemaker-training offers to scripts: its variables, and the SDK's ``distribution``."""
