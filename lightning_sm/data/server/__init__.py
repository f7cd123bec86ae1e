"""The gRPC server process of a data host."""
