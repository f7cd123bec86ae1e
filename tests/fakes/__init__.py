"""Stand-ins for SageMaker, for hosts and for users, and the material that several test files share."""
