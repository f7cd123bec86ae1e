"""The facts of a job that SageMaker provides, and the rules based on them."""
