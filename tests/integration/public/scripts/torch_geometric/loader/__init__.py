from torch_geometric.loader.neighbor_loader import NeighborLoader

__all__ = ["NeighborLoader"]
