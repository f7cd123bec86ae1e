"""Tools for managing jobs on the service from a laptop, which only need boto3."""
