"""On trainers: the part of the data service that runs inside the training process."""
