"""Reports in a browser and in a terminal."""
