"""What sagemaker-training promises to scripts: its variables, and the SDK's ``distribution``."""
