"""Callbacks that SageMakerCLI puts in."""
