"""Checkpoints: choosing the one from which a job resumes, and writing them."""
