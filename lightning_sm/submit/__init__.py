"""Submitting jobs described in a small YAML file, which is checked before anything is sent."""
