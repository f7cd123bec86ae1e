"""On data hosts: the main process and its workers, which run the user's DataModule."""
