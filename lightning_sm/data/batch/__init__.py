"""Batches as bytes: in shared memory, and on the wire."""
