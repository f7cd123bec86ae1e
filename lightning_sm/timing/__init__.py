"""The training process's clock: where the time of each step goes."""
