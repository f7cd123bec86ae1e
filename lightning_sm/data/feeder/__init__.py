"""On trainers, one for each rank: the process of the gRPC client."""
