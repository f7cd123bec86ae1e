"""Stand-ins for what SageMaker provides to a training job."""
