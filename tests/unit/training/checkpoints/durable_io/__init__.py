"""Tests of how checkpoints reach the disk, with real files and Trainers."""
