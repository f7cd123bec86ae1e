"""The main process of a data host and its workers, which run the user's DataModule."""
