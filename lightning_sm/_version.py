"""The version of lightning_sm."""

__version__ = "0.1.0"
