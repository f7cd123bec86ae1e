"""The facts that SageMaker provides about a job, and the rules based on them."""
