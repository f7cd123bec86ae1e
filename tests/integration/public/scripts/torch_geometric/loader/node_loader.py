from dataclasses import dataclass

import torch

from torch_geometric.data import Data
from torch_geometric.loader.base import DataLoaderIterator


@dataclass
class SamplerOutput:
    node: torch.Tensor
    edge: torch.Tensor
    seeds: torch.Tensor


class NodeLoader(torch.utils.data.DataLoader):
    """Samples the neighborhoods of seed nodes in workers, and fetches features there or in the main process."""

    def __init__(self, data, node_sampler, input_nodes, transform=None, filter_per_worker=None, **options):
        self.data = data
        self.node_sampler = node_sampler
        self.input_nodes = input_nodes
        self.transform = transform
        self.filter_per_worker = bool(filter_per_worker)
        options.pop("dataset", None)
        options.pop("collate_fn", None)
        super().__init__(range(len(input_nodes)), collate_fn=self.collate_fn, **options)

    def collate_fn(self, index):
        out = self.node_sampler(self.input_nodes[torch.tensor(index)])
        return self.filter_fn(out) if self.filter_per_worker else out

    def filter_fn(self, out):
        place = torch.full((len(self.data.x),), -1)
        place[out.node] = torch.arange(len(out.node))
        data = Data(x=self.data.x[out.node], edge_index=place[self.data.edge_index[:, out.edge]])
        data.y = self.data.y[out.node]
        data.n_id, data.input_id, data.batch_size = out.node, out.seeds, len(out.seeds)
        data._orig_edge_index = self.data.edge_index[:, out.edge]
        return data if self.transform is None else self.transform(data)

    def _get_iterator(self):
        if self.filter_per_worker:
            return super()._get_iterator()
        return DataLoaderIterator(super()._get_iterator(), self.filter_fn)
