"""The data service with real processes and sockets."""
