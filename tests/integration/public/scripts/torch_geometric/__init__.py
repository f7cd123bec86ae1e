"""A stand-in for torch_geometric with graphs and loaders of the same structure, for a script that uses them."""
