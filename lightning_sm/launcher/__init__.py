"""``lightning-sm train``, which runs one host of a job from its start to its exit code."""
