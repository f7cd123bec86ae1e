"""Records, and what is made of them."""
