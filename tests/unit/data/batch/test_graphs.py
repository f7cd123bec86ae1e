"""Graphs in the shape of torch_geometric's arrive as they are, and broken ones end in an error that says so."""

import sys

import numpy as np
import pytest
import torch

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.batch.encode import encode
from lightning_sm.errors import BatchTypeError, WireError
from tests.fakes.batches import Opaque, header, make_slot, send
from tests.fakes.graph_library import imported_data
from tests.unit.data.batch.test_fuzz import Mutator, try_message


@pytest.fixture
def library():
    """The shape of torch_geometric.data, imported for one test."""
    with imported_data() as data:
        yield data


@pytest.fixture
def molecule(library, monkeypatch):
    """A subclass of Data whose constructor requires an argument, in this module."""

    class Molecule(library.Data):
        armed = False

        def __init__(self, smiles, **options):
            if self.armed and smiles is not None:
                raise AssertionError("__init__ ran")
            super().__init__(**options)
            if smiles is not None:
                self.smiles = smiles

        def __setattr__(self, key, value):
            if self.armed:
                raise AssertionError("__setattr__ ran")
            super().__setattr__(key, value)

    Molecule.__qualname__ = "Molecule"
    monkeypatch.setattr(sys.modules[__name__], "Molecule", Molecule, raising=False)
    return Molecule


def hetero(library):
    """A graph with two types of nodes, an attribute of its own and a private one."""
    graph = library.HeteroData()
    graph["a"].x, graph["b"].x = torch.rand(3, 2), torch.rand(2, 1)
    graph["a", "to", "b"].edge_index = torch.tensor([[0, 1], [1, 0]])
    graph["a"]._perm = torch.arange(3)
    graph.name = "g"
    return graph


def assert_equal_stores(received, sent):
    """Compare all that the stores of two graphs hold, and whom they belong to."""
    assert type(received) is type(sent)
    for mine, theirs in zip(received.stores, sent.stores, strict=True):
        assert type(mine) is type(theirs)
        assert mine._parent() is received
        assert vars(mine).get("_key") == vars(theirs).get("_key")
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[key], theirs[key]) if torch.is_tensor(mine[key]) else True for key in mine)
        private = {key for key in vars(theirs) if key not in ("_mapping", "_parent", "_key", "_cached_attr")}
        assert private <= set(vars(mine))
    assert {key for key in vars(received) if key.endswith("_cls")} == {"_tensor_attr_cls"}


def test_graphs_arrive(library):
    """Homogeneous and heterogeneous graphs keep stores, attributes, and stores' references to the graph."""
    graph = library.Data(
        torch.rand(3, 2), torch.tensor([[0, 1], [1, 2]]), y=1.5, name="n", adj=torch.eye(3).to_sparse()
    )
    graph._orig = torch.ones(1)
    vars(graph)["extra"] = [1]
    received = send([graph, graph])
    assert received[0] is received[1]
    assert received[0].y == 1.5
    assert received[0]._orig.tolist() == [1]
    assert vars(received[0])["extra"] == [1]
    assert torch.equal(received[0].adj.to_dense(), torch.eye(3))
    received[0].z = torch.zeros(3)  # the cache of the store was made anew
    many = hetero(library)
    assert_equal_stores(send(many), many)


def test_batches_of_graphs_arrive(library, molecule):
    """A batch has the class that the library makes for it, also of graphs of the user's class."""
    graphs = {
        "DataBatch": library.Data(torch.rand(3, 2)),
        "HeteroDataBatch": hetero(library),
        "MoleculeBatch": molecule("CC", x=torch.rand(2, 2)),
    }
    for name, graph in graphs.items():
        batch = library.Batch.from_data_list([graph, graph])
        assert type(batch).__module__ == "abc"
        received = send({"graphs": batch})["graphs"]
        assert type(received).__name__ == name
        assert_equal_stores(received, batch)
        assert received.num_graphs == 2
        assert received._slice_dict["x"].tolist() == [0, 1, 2]


def test_no_code_of_a_subclass_sees_the_message(library, molecule, monkeypatch):
    """The graph of a subclass is made without its constructor and its __setattr__."""
    graph = molecule("CC", x=torch.ones(2, 2))
    arena = Arena(make_slot())
    message = encode([graph, library.Batch.from_data_list([graph])], arena)
    monkeypatch.setattr(molecule, "armed", True)
    received = decode(message, np.frombuffer(arena._memory, np.uint8))
    assert received[0].smiles == "CC"
    assert received[1].smiles == ["CC"]


def test_a_process_that_lacks_the_batch_class_makes_it(library, molecule):
    """The class of a batch need not exist where it arrives: the library makes it, as when it unpickles one."""
    arena = Arena(make_slot())
    message = encode(library.Batch.from_data_list([molecule("CC", x=torch.ones(2, 2))]), arena)
    module = sys.modules["torch_geometric.data.batch"]
    del module.MoleculeBatch
    received = decode(message, np.frombuffer(arena._memory, np.uint8))
    assert type(received) is module.MoleculeBatch


def test_what_cannot_be_sent_is_named(library):
    """The error names the place in the graph."""
    graph = hetero(library)
    graph["a"].image = Opaque()
    with pytest.raises(BatchTypeError, match=r'batch\[0\]\.parts\["nodes"\]\["a"\]\[0\]\["image"\] is a .*Opaque'):
        send([graph])


BASE, BATCH = "torch_geometric.data.data:Data", "torch_geometric.data.batch:Batch"
STORE = ["l", ["d"], ["d"]]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "node",
    [
        ["p", BASE, 1],
        ["p", BASE, ["d", "store", STORE]],
        ["p", BASE, ["d", "store", STORE, "attributes", ["d", "_store", 1]]],
        ["p", BASE, ["d", "store", ["l", ["d", 1, 2], ["d"]], "attributes", ["d"]]],
        ["p", BASE, ["d", "store", ["l", ["d"], ["d", "_parent", 2]], "attributes", ["d"]]],
        ["p", BASE, ["d", "store", STORE, "attributes", ["d", "_tensor_attr_cls", 2]]],
        ["p", BASE, ["d", "store", STORE, "attributes", ["d"], "nodes", ["d", "a", STORE]]],
        ["p", "torch_geometric.data.data:BaseData", ["d", "store", STORE, "attributes", ["d"]]],
        ["p", "torch_geometric.data.hetero_data:HeteroData", ["d", "store", STORE, "attributes", ["d"], "edges", 1]],
        ["p", f"{BATCH}[torch_geometric.data.data:BaseData]", ["d", "store", STORE, "attributes", ["d"]]],
    ],
)
def test_broken_graphs_are_refused(node):
    """Parts that are not a graph's, and values in the place of what the library sets, are a WireError."""
    with pytest.raises(WireError):
        decode(header(node), make_slot(0))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", [f"{BATCH}[builtins:dict]", f"builtins:dict[{BASE}]", "torch_geometric.data.x:Data"])
def test_names_of_other_classes_are_refused(name):
    """Only classes of graphs, and of batches of them, are made as such."""
    with pytest.raises(BatchTypeError, match="neither imported nor registered"):
        decode(header(["p", name, ["d", "store", STORE, "attributes", ["d"]]]), make_slot(0))


def test_mutated_graphs_decode_or_are_refused(library, molecule):
    """Graphs with random changes of the message are a graph or one of the two errors."""
    corpus = []
    graph = molecule("CC", x=torch.ones(2, 2))
    for sent in (
        graph,
        hetero(library),
        library.Batch.from_data_list([graph]),
        library.Batch.from_data_list([hetero(library)]),
    ):
        arena = Arena(make_slot(8192))
        message = encode(sent, arena)
        corpus.append((message, np.frombuffer(arena._memory, np.uint8)[: arena.used].tobytes()))
    mutator = Mutator(corpus, 0)
    decoded = [
        try_message(m, np.frombuffer(bytearray(d), np.uint8)) for m, d in (mutator.message() for _ in range(3000))
    ]
    assert 0.02 < sum(graph is not None for graph in decoded) / len(decoded) < 0.8
