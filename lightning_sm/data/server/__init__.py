"""On data hosts: the process of the gRPC server."""
