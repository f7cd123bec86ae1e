"""What the processes of one host share: messages, memory, supervision."""
