"""Stand-ins for SageMaker, hosts and users, and helpers that several test files share."""
