"""Which samples each step has on each rank."""
