"""The feeder processes, which receive batches on the trainer hosts: one per rank."""
