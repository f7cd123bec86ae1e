from torch_geometric.data.batch import Batch
from torch_geometric.data.data import Data
from torch_geometric.data.hetero_data import HeteroData

__all__ = ["Batch", "Data", "HeteroData"]
