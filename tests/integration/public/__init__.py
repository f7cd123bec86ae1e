"""Scripts in the shape of public ones, plainly and in jobs."""
