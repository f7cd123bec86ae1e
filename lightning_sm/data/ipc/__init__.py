"""Messages, memory and supervision between processes of one host."""
