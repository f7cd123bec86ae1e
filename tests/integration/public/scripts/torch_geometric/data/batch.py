"""Batches, whose class is created at run time from this class and the class of their graphs."""

import inspect

import torch

from torch_geometric.data.data import Data


class DynamicInheritance(type):
    def __call__(cls, *args, **options):
        base = options.pop("_base_cls", Data)
        name = f"{base.__name__}{cls.__name__}"
        if name not in globals():

            class MetaResolver(type(cls), type(base)):
                pass

            globals()[name] = MetaResolver(name, (cls, base), {})
        for key, value in list(inspect.signature(base.__init__).parameters.items())[1:]:
            if value.default is inspect.Parameter.empty and key != "options":
                options.setdefault(key, None)
        return super(DynamicInheritance, globals()[name]).__call__(*args, **options)


class Batch(metaclass=DynamicInheritance):
    @classmethod
    def from_data_list(cls, graphs):
        batch = cls(_base_cls=type(graphs[0]))
        for store, *others in zip(batch_stores(batch, graphs[0]), *(graph.stores for graph in graphs), strict=True):
            for key in others[0]:
                values = [other[key] for other in others]
                store[key] = (
                    torch.cat(values, -1 if "index" in key else 0) if isinstance(values[0], torch.Tensor) else values
                )
        batch._num_graphs = len(graphs)
        batch._slice_dict = {"x": torch.arange(len(graphs) + 1)}
        return batch

    @property
    def num_graphs(self):
        return self._num_graphs


def batch_stores(batch, graph):
    for key in graph.__dict__.get("_node_store_dict", {}):
        batch.get_node_store(key)
    for key in graph.__dict__.get("_edge_store_dict", {}):
        batch.get_edge_store(*key)
    return batch.stores
