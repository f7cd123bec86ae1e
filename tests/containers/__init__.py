"""Tests that build our image and run it, by hand and through the SageMaker SDKs."""
