"""``lightning-sm replay``."""
