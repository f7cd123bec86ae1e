"""The plan: which samples each step has on each rank."""
