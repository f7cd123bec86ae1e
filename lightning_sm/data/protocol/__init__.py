"""The protocol between data hosts and feeders."""
