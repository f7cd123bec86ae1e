"""``lightning-sm train``: one host of a job, from its start to its exit code."""
