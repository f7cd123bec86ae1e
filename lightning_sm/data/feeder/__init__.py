"""On trainers, one for each rank: the process that receives batches."""
