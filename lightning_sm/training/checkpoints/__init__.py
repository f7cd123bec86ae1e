"""Which checkpoint a job resumes from, and how checkpoints are written."""
