"""The rules of ``lightning-sm replay``."""
