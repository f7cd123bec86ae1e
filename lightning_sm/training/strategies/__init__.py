"""The strategies that lightning_sm adds to those of Lightning."""
