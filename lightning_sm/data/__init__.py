"""The data service: data hosts run the user's datasets and stream finished batches to the trainers."""
