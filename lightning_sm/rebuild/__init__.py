"""``lightning-sm replay``: a recorded step's samples, and its batches, built again from the user's script."""
