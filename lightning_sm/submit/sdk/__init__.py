"""The SageMaker SDK, versions 2 and 3."""
