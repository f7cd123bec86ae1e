"""The tests of lightning_sm and of the example app."""
