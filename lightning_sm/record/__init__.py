"""The record of a run, which its processes write down, and its readers."""
