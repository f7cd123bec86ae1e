"""Callbacks that SageMakerCLI and SageMakerTrainer add to a job."""
