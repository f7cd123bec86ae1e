"""The training process's clock, which divides the time of each step into parts."""
