"""The record that the processes of a run write, and the code that reads it."""
