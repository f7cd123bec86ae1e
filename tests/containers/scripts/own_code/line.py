# A module beside the script.
import torch


def make():
    return torch.nn.Linear(1, 1)
