"""A plain MPI program, which uses neither Lightning nor a strategy."""
