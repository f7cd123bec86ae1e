"""Strategies that lightning_sm adds to Lightning."""
