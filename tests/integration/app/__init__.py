"""Integration tests of the example app."""
