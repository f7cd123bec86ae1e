"""Mutation testing of the pure rules; ``python -m tests.mutants`` runs it."""
