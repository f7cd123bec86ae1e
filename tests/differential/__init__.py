"""Differential tests: random scripts, run with and without data hosts: ``python -m tests.differential.same``."""
