"""The part of the data service that runs in the training process."""
