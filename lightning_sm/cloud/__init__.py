"""Tools for managing jobs on the service from a laptop; they only need boto3."""
