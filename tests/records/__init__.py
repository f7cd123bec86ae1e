"""Records of real jobs, each with one known limit, and the script that makes them."""
