"""Tests of lightning_sm and the example app."""
