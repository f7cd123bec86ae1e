"""On trainers: what runs inside the training process."""
