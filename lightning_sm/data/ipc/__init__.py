"""Messages, shared memory and supervision for the processes of one host."""
