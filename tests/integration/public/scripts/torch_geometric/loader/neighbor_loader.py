import torch

from torch_geometric.loader.node_loader import NodeLoader, SamplerOutput


class NeighborSampler:
    def __init__(self, edge_index, num_neighbors):
        self.edge_index, self.num_neighbors = edge_index, num_neighbors

    def __call__(self, seeds):
        nodes, edges = seeds.tolist(), []
        frontier = nodes
        for count in self.num_neighbors:
            new = []
            for node in frontier:
                found = (self.edge_index[1] == node).nonzero().flatten()
                if 0 <= count < len(found):
                    found = found[torch.randperm(len(found))[:count]]
                edges += found.tolist()
                new += self.edge_index[0, found].tolist()
            frontier = [node for node in dict.fromkeys(new) if node not in nodes]
            nodes = [*nodes, *frontier]
        return SamplerOutput(torch.tensor(nodes), torch.tensor(list(dict.fromkeys(edges)), dtype=torch.long), seeds)


class NeighborLoader(NodeLoader):
    def __init__(self, data, num_neighbors, input_nodes, transform=None, filter_per_worker=None, **options):
        sampler = NeighborSampler(data.edge_index, num_neighbors)
        super().__init__(data, sampler, input_nodes, transform, filter_per_worker, **options)
