"""Batches of classes that extend tensors and builtin types, and graphs, arrive from a data host as they are."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.fakes.batches import Box, Items, Record, Volume
from tests.fakes.graph_library import import_data, imported_data
from tests.integration.data.cluster import remote

pytestmark = pytest.mark.processes


def volumes(samples):
    """Collate tensors with metadata, in a dictionary and a list of classes of their own."""
    volume = Volume(torch.stack(samples), {"affine": torch.eye(4), "path": [Path(f"{len(samples)}.nii")]})
    volume._is_batch = True
    record = Record(image=volume, counts=Counter(len(sample) for sample in samples))
    record.source = Items([Box(volume[0])])
    return record


def graphs(samples):
    """Collate graphs with two types of nodes."""
    library = import_data()
    made = []
    for sample in samples:
        graph = library.HeteroData()
        graph["a"].x, graph["b"].x = sample[:, None], sample[:2, None]
        graph["a", "to", "b"].edge_index = torch.tensor([[0, 1], [1, 0]])
        graph.name = f"sum {sample.sum()}"
        made.append(graph)
    return library.Batch.from_data_list(made)


def make():
    """Loaders of both."""
    data = [torch.full((3,), float(number)) for number in range(8)]
    return {"volumes": DataLoader(data, 2, collate_fn=volumes), "graphs": DataLoader(data, 2, collate_fn=graphs)}


def test_classes_and_graphs_arrive_from_a_data_host(pool):
    """They arrive with metadata, attributes, and stores that refer to their graph."""
    with imported_data() as library, remote(pool.serve(make)[:1]) as module:
        loaders = module.train_dataloader()
        for number, record in enumerate(loaders["volumes"]):
            assert type(record) is Record
            assert type(record["image"]) is Volume
            assert record["image"].tolist() == [[2.0 * number] * 3, [2.0 * number + 1] * 3]
            assert record["image"].meta["affine"].tolist() == torch.eye(4).tolist()
            assert record["image"].meta["path"] == [Path("2.nii")]
            assert record["image"]._is_batch
            assert record["counts"] == Counter({3: 2})
            assert type(record.source) is Items
            assert type(record.source[0].corners) is Volume
            assert record.source[0].corners.tolist() == [2.0 * number] * 3
        for number, batch in enumerate(loaders["graphs"]):
            assert type(batch).__name__ == "HeteroDataBatch"
            assert isinstance(batch, library.HeteroData)
            assert batch.num_graphs == 2
            assert batch["a"].x.flatten().tolist() == [2.0 * number] * 3 + [2.0 * number + 1] * 3
            assert batch["a", "to", "b"].num_edges == 4
            assert batch["a"]._parent() is batch
            assert batch.name == [f"sum {6.0 * number}", f"sum {6.0 * number + 3}"]
        assert number == 3
