"""The process that receives batches: one for each rank, on the trainer hosts."""
