"""Tests of how checkpoints get to the disk: real files, and Trainers that write them."""
