"""What a run writes down, and how it is read."""
