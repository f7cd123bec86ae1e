"""The callbacks that SageMakerCLI and SageMakerTrainer add to a job."""
