"""What data hosts and feeders say to each other, and how."""
