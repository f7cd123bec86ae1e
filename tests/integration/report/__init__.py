"""Reports as a browser shows them, and as jobs write them."""
