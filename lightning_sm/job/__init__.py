"""What SageMaker says about a job, and the rules that follow from it."""
