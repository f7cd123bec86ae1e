"""Unit tests of the example app."""
