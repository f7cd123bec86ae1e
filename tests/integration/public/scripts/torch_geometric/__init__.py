"""The shape of torch_geometric's graphs and loaders, for a script that uses them."""
