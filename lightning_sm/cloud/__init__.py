"""Tools to look after jobs on the service from a laptop, with boto3 alone."""
