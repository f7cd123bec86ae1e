"""Writing checkpoints, and choosing the checkpoint from which a job resumes."""
